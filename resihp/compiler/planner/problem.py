"""What the planner decides on: who computes which chunk of work at what cost.

Times are whole ticks, so that equal times are equal. A replica that lacks a stage has None there;
its micro-batches of that stage must run on another replica. Replicas with equal rows are planned
as one until something sets them apart.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TICK_S", "Capacity", "Chunks", "Problem", "Replica", "total"]

TICK_S = 1e-9
"""Seconds of a tick where times come from prices."""


class Chunks(NamedTuple):
    """Ticks of one micro-batch's F, B and W at one stage of one replica."""

    forward: int
    backward_input: int
    backward_weight: int


class Capacity(NamedTuple):
    """Bytes on a member of one TP group: what is free beside the state, and what a chunk takes.

    F takes `activation`; B takes `held` and gives `released` back; W gives back the rest.
    """

    free: int
    activation: int
    released: int
    held: int


class Replica(NamedTuple):
    """One row per stage."""

    chunks: tuple[Chunks | None, ...]
    memory: tuple[Capacity | None, ...]
    edges: tuple[int, ...]
    """Ticks that a tensor takes from stage s to s + 1 (or back) inside the replica."""


class Problem(NamedTuple):
    """One iteration of a job."""

    replicas: tuple[Replica, ...]
    """By logical replica: each is also the home of `num_microbatches` micro-batches."""
    num_microbatches: int
    crossing: tuple[int, ...]
    """Ticks from stage s to s + 1 (or back) between two replicas."""
    split: bool
    """Whether B and W are separate; otherwise W follows its B at once."""
    in_flight: tuple[int, ...] | None = None
    """Most micro-batches between F and B at each stage; None: as many as memory holds."""
    kept: frozenset[tuple[int, int]] = frozenset()
    """(home, number) of micro-batches that are done already: nobody runs them. `search` does not
    know of them, only plays of `balanced` and `homeless_placed` do."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.replicas[0].chunks)

    @property
    def kept_of(self) -> dict[int, frozenset[int]]:
        """Numbers of the micro-batches that are done already, by home; of homes that have some."""
        numbers: dict[int, set[int]] = {}
        for home, number in self.kept:
            numbers.setdefault(home, set()).add(number)
        return {home: frozenset(each) for home, each in numbers.items()}


def total(chunks: Chunks) -> int:
    """Ticks of all work on one micro-batch at one stage."""
    return sum(chunks)
