"""Placings of the published systems: whole micro-batches by speed, and lost work round robin.

They are rivals in a comparison (`resihp.compiler.policies`) and, since a plan may move work as they
do, starting points of the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace, nsmallest

from resihp.compiler.planner.balance import spread
from resihp.compiler.planner.planned import Item
from resihp.compiler.planner.problem import Problem, total

__all__ = ["carriers_of", "even_shares", "replica_ticks", "round_robin"]

_LEVELS = 12
"""Levels on each side of the exact one that shares are made for, up to the longest time away."""
_LEVELS_TIMES_SHARES = 768
"""Of many replicas there are fewer levels: the nearer to each other are loads of one level."""
_MOST_KINDS = 16
"""Replicas that a move is looked for among, on each side, the most promising ones."""


def round_robin(problem: Problem, carriers: Mapping[Item, int]) -> dict[Item, dict[int, int]]:
    """The placing in which each micro-batch runs in its carrier, by default its home.

    What the carrier lacks goes to the replicas that have it, one after the other.
    """
    placing: dict[Item, dict[int, int]] = {}
    for stage in range(problem.num_stages):
        alive = [d for d, row in enumerate(problem.replicas) if row.chunks[stage] is not None]
        lacking = frozenset(range(len(problem.replicas))).difference(alive)
        touched = (
            (home, number)
            for home in range(len(problem.replicas))
            for number in range(problem.num_microbatches)
            if home in lacking or (home, number) in carriers
        )
        turn = 0
        for item in touched:
            replica = carriers.get(item, item[0])
            if replica in lacking:
                replica = alive[turn % len(alive)]
                turn += 1
            if replica != item[0]:
                placing.setdefault(item, {})[stage] = replica
    return placing


def carriers_of(problem: Problem) -> dict[Item, int]:
    """The replica that runs each micro-batch that does not stay at home, by `even_shares`."""
    size = problem.num_microbatches
    ticks = replica_ticks(problem)
    known = [d for d, each in enumerate(ticks) if each > 0]
    if len({ticks[d] for d in known}) <= 1 and len(known) == len(ticks):
        return {}
    shares = dict.fromkeys(range(len(ticks)), 0)
    counts = even_shares([ticks[d] for d in known], size * len(ticks))
    shares.update(zip(known, counts, strict=True))
    takers = [d for d, count in shares.items() for _ in range(count - size)]
    giving = [
        (home, number)
        for home, count in shares.items()
        if count < size
        for number in spread(size, size - count)
    ]
    return dict(zip(giving, takers, strict=True))


def replica_ticks(problem: Problem) -> list[int]:
    """What each replica takes for a micro-batch: its slowest stage, of those that it has."""
    return [
        max((total(chunks) for chunks in row.chunks if chunks is not None), default=0)
        for row in problem.replicas
    ]


def even_shares(ticks: Sequence[float], count: int) -> list[int]:
    """Whole numbers m_d >= 1 that add up to `count` and make m_d * ticks_d vary least.

    The variance is the least sum of squared distances to any level. For each of some levels around
    that of exact shares the sum is made small one by one, then single moves lower the variance.
    """
    assert count >= len(ticks)
    exact = count / sum(1 / each for each in ticks)
    num_levels = min(_LEVELS, 1 + _LEVELS_TIMES_SHARES // len(ticks))
    levels = {exact + step / num_levels * max(ticks) for step in range(-num_levels, num_levels + 1)}
    found = [_settled(_near(level, ticks, count), ticks) for level in sorted(levels)]
    return min(found, key=lambda shares: _variance(shares, ticks))


def _near(level: float, ticks: Sequence[float], count: int) -> list[int]:
    """Shares whose products are as near to `level` as their sum allows."""
    shares = [max(1, round(level / each)) for each in ticks]
    step = 1 if sum(shares) < count else -1

    def added(d: int) -> float:
        return step * ticks[d] * (step * ticks[d] + 2 * (shares[d] * ticks[d] - level))

    heap = [(added(d), d) for d, share in enumerate(shares) if share + step >= 1]
    heapify(heap)
    for _ in range(abs(count - sum(shares))):
        d = heap[0][1]
        shares[d] += step
        heapreplace(heap, (added(d) if shares[d] + step >= 1 else float("inf"), d))
    return shares


def _settled(shares: list[int], ticks: Sequence[float]) -> list[int]:
    while (move := _best_move(shares, ticks)) is not None:
        shares[move[0]] -= 1
        shares[move[1]] += 1
    return shares


def _variance(shares: Sequence[int], ticks: Sequence[float]) -> float:
    loads = [share * each for share, each in zip(shares, ticks, strict=True)]
    mean = sum(loads) / len(loads)
    return sum((load - mean) ** 2 for load in loads)


def _best_move(shares: Sequence[int], ticks: Sequence[float]) -> tuple[int, int] | None:
    """(from, to) of the move that lowers the variance most; replicas that are alike once.

    Of many kinds only those are tried that alone lower the sum of squares most, whatever the
    mean: that of the loads changes little where there are many.
    """
    size = len(ticks)
    loads = [share * each for share, each in zip(shares, ticks, strict=True)]
    mean = sum(loads) / size
    kinds = list({(ticks[d], shares[d]): d for d in range(size)}.values())

    def less(d: int) -> float:
        return ticks[d] * (ticks[d] - 2 * (loads[d] - mean))

    def more(d: int) -> float:
        return ticks[d] * (ticks[d] + 2 * (loads[d] - mean))

    givers = [(less(d), d) for d in kinds if shares[d] > 1]
    takers = [(more(d), d) for d in kinds]
    best, move = -1e-9 * mean * mean, None
    for taken, giver in nsmallest(_MOST_KINDS, givers):
        for added, taker in nsmallest(_MOST_KINDS, takers):
            change = taken + added - (ticks[taker] - ticks[giver]) ** 2 / size
            if giver != taker and change < best:
                best, move = change, (giver, taker)
    return move
