"""A placing of whole micro-batches: each runs all its stages in one replica.

A replica takes one micro-batch after the other at the pace of its slowest stage. The next one goes
to whoever is done with it first, which makes the last to end as early as can be: giving each piece
to the worker that ends up earliest is exact for equal pieces.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from resihp.compiler.planner.balance import spread
from resihp.compiler.planner.engine import Item
from resihp.compiler.planner.problem import Problem, Replica, total

__all__ = ["whole_placing"]


def whole_placing(problem: Problem, *, move: bool = True) -> dict[Item, dict[int, int]]:
    """The placing; with `move` False only the micro-batches of replicas that are gone move.

    Each replica has all stages or none.
    """
    size = problem.num_microbatches
    paces = [_pace(row) for row in problem.replicas]
    stay = 0 if move else size
    counts = _counts(paces, stay, size)
    given = {d: size if pace is None else max(0, size - counts[d]) for d, pace in enumerate(paces)}
    takers = [d for d in range(len(paces)) for _ in range(counts[d] - size)]
    placing: dict[Item, dict[int, int]] = {}
    for home, number in _leaving(given, size):
        placing[home, number] = dict.fromkeys(range(problem.num_stages), takers.pop(0))
    return placing


def _pace(row: Replica) -> int | None:
    """Ticks of the slowest stage; None for a replica without stages."""
    held = [total(chunks) for chunks in row.chunks if chunks is not None]
    assert len(held) in (0, len(row.chunks)), "a replica has all stages or none"
    return max(held, default=None)


def _counts(paces: list[int | None], stay: int, size: int) -> list[int]:
    """Micro-batches of each replica, at least `stay` of each that is left."""
    counts = [0 if pace is None else stay for pace in paces]
    ends = [((counts[d] + 1) * pace, d, pace) for d, pace in enumerate(paces) if pace is not None]
    heapify(ends)
    for _ in range(size * len(paces) - sum(counts)):
        end, replica, pace = heappop(ends)
        counts[replica] += 1
        heappush(ends, (end + pace, replica, pace))
    return counts


def _leaving(given: dict[int, int], size: int) -> list[Item]:
    """Which micro-batches go: spread over the queue of their home."""
    return [(home, number) for home, count in given.items() for number in spread(size, count)]
