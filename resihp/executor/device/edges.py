"""Which communicators a rank makes for point-to-point messages, and in which order.

Every directed pair of ranks that a plan sends tensors between has a communicator of its own, with
a stream of its own: a message waits for nothing but the messages before it on the same pair, which
is what the transport `edge` promises (`resihp.ir.transport`).

To make one, both ranks must come to it at the same time. All ranks walk through one list, the
pairs of the whole plan in the order of their first use, and each makes those that it is in. Of all
pairs that are not made yet the first is the next of both its ranks: nobody waits in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from resihp.errors import ConfigError
from resihp.ir.expand import expand

if TYPE_CHECKING:
    from resihp.ir.model import Plan

__all__ = ["MAX_CONNECTIONS", "MAX_EDGES", "Edge", "check_edges", "edges_of", "plan_edges"]

MAX_CONNECTIONS = 32
"""Queues from the host to one device: the most that CUDA_DEVICE_MAX_CONNECTIONS gives.

Streams that share one wait for each other, which a plan is not proved under. Torch's pool has as
many streams of each priority, and then gives the first ones again.
"""
_OTHER_STREAMS = 5
"""Compute, comm, to host, from host, and the default one."""
MAX_EDGES = MAX_CONNECTIONS - _OTHER_STREAMS
"""Directed pairs that one rank can be in."""


class Edge(NamedTuple):
    """A directed pair of ranks."""

    source: int
    target: int

    @property
    def name(self) -> str:
        """Unique in a generation."""
        return f"edge.{self.source}.{self.target}"


def plan_edges(plan: Plan) -> list[Edge]:
    """All pairs that the plan sends between, by instruction of their first use, then by rank."""
    first_use: dict[Edge, int] = {}
    for rank in plan.active_ranks:
        for index, instr in enumerate(expand(plan, rank).instrs):
            if instr.op.is_send:
                for transfer in instr.transfers:
                    first_use.setdefault(Edge(rank, transfer.peer), index)
    return sorted(first_use, key=lambda edge: (first_use[edge], edge))


def edges_of(plan: Plan, rank: int) -> list[Edge]:
    """Those that `rank` is in, in the order in which it makes them."""
    return [edge for edge in plan_edges(plan) if rank in edge]


def check_edges(edges: Sequence[Edge], most: int = MAX_EDGES) -> None:
    """ConfigError, the same on every rank, where one is in more pairs than it has streams for."""
    num_of = Counter(rank for edge in edges for rank in edge)
    for rank, num in sorted(num_of.items()):
        if num > most:
            raise ConfigError(
                f"rank {rank} exchanges tensors with others over {num} directed pairs, and a "
                f"CUDA device has streams for {most}: a smaller TP degree or fewer replicas that "
                f"share work need fewer"
            )
