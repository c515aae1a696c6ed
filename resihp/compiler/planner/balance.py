"""A placing of micro-batches that evens out the work of each stage before anything is played.

Stage by stage: the micro-batches of a replica that lacks the stage go to whoever ends up least
loaded; then single ones move from the most to the least loaded worker as long as that leaves the
receiver with less work than the giver had (the guard of Algorithm 1). Workers with one kind of
chunk make this exact: no other placing has a smaller largest load.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from resihp.compiler.planner.planned import Item
from resihp.compiler.planner.problem import Problem, total

__all__ = ["balanced", "homeless_placed", "spread"]


def balanced(problem: Problem, *, spaced: bool = True) -> dict[Item, dict[int, int]]:
    """The placing. What a replica gives away lies evenly in its queue (`spaced`), or at its end."""
    placing: dict[Item, dict[int, int]] = {}
    for stage in range(problem.num_stages):
        _place_stage(problem, stage, placing, spaced=spaced, only_homeless=False)
    return placing


def homeless_placed(problem: Problem) -> dict[Item, dict[int, int]]:
    """Only what must move: the micro-batches of stages that their home lacks."""
    placing: dict[Item, dict[int, int]] = {}
    for stage in range(problem.num_stages):
        _place_stage(problem, stage, placing, spaced=True, only_homeless=True)
    return placing


def _place_stage(
    problem: Problem,
    stage: int,
    placing: dict[Item, dict[int, int]],
    *,
    spaced: bool,
    only_homeless: bool,
) -> None:
    size, kept_of = problem.num_microbatches, problem.kept_of
    rows = [row.chunks[stage] for row in problem.replicas]
    costs = [None if chunks is None else total(chunks) for chunks in rows]
    load = [(size - len(kept_of.get(d, ()))) * (cost or 0) for d, cost in enumerate(costs)]
    takers = [(load[d] + cost, d) for d, cost in enumerate(costs) if cost is not None]
    heapify(takers)
    for number in range(size):
        for home, cost in enumerate(costs):
            if cost is None and (home, number) not in problem.kept:
                replica = _take(takers, load, costs)
                placing.setdefault((home, number), {})[stage] = replica
    if only_homeless:
        return
    given = _even_out(load, costs, takers)
    for home, receivers in given.items():
        own = [number for number in range(size) if (home, number) not in problem.kept]
        left = len(own)
        count = min(len(receivers), left)
        places = spread(left, count) if spaced else range(left - count, left)
        for place, replica in zip(places, receivers, strict=False):
            placing.setdefault((home, own[place]), {})[stage] = replica


def _take(takers: list[tuple[int, int]], load: list[int], costs: Sequence[int | None]) -> int:
    """The worker that ends up least loaded with one chunk more gets it."""
    after, replica = heappop(takers)
    cost = costs[replica]
    assert cost is not None
    load[replica] = after
    heappush(takers, (after + cost, replica))
    return replica


def _even_out(
    load: list[int], costs: Sequence[int | None], takers: list[tuple[int, int]]
) -> dict[int, list[int]]:
    """Receivers of what each replica gives away, in the order in which it is decided."""
    givers = [(-load[d], d) for d, cost in enumerate(costs) if cost is not None]
    heapify(givers)
    given: dict[int, list[int]] = {}
    while givers:
        known, giver = heappop(givers)
        if -known != load[giver]:
            continue  # an old entry: its load has changed since
        after, taker = takers[0]
        if after >= load[giver] or taker == giver:
            break
        _take(takers, load, costs)
        load[giver] -= costs[giver] or 0
        given.setdefault(giver, []).append(taker)
        heappush(givers, (-load[giver], giver))
    return given


def spread(size: int, count: int) -> list[int]:
    """`count` numbers below `size`, as far from each other as they can be."""
    return [(2 * index + 1) * size // (2 * count) for index in range(count)]
