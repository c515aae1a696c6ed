"""What a play of the pipelines is asked for, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resihp.ir.model import Op

__all__ = ["GREEDY", "Item", "Order", "Placing", "Planned", "Style"]

Item = tuple[int, int]
"""A micro-batch: (home replica, number there)."""
Placing = Mapping[Item, Mapping[int, int]]
"""The replica that runs a stage of a micro-batch, where that is not its home."""
Order = tuple[tuple[Op, int, int], ...]
"""What one worker runs: (operation, home, number); the home is -1 for the replica's own."""


class Style(NamedTuple):
    """How a worker chooses where more than one thing can be done."""

    overrun: float = 1.0
    """The share of a W by which it may delay an F or B that is known to come; 1: W whenever there
    is nothing better at the moment."""
    forward_first: bool = False
    """Whether F comes before B where both can be done."""
    whim: float = 0.0
    """Probability of doing the second best, or of waiting for what comes next, to look beyond the
    greedy choice."""
    seed: int = 0
    """Of the whims."""


GREEDY = Style()


class Planned(NamedTuple):
    """What comes of one play."""

    makespan: int
    """Ticks until the last worker ends."""
    orders: dict[int, tuple[Order, ...]]
    """Per replica and stage. Replicas of one class share the object."""
    placing: dict[Item, dict[int, int]]
    """Who runs what is not run at home."""
    complete: bool
    """Whether everything was run; not, where memory never had room."""
    ends: tuple[int, ...] = ()
    """Ticks until the last worker of each stage ends; empty where they were not kept."""

    @property
    def num_moved(self) -> int:
        """Chunks (micro-batch, stage) that run away from home."""
        return sum(len(stages) for stages in self.placing.values())
