"""A time that no plan of a problem can beat: the work of each stage, shared as evenly as can be.

A stage cannot begin before a forward has come through all stages before it, nor be the last to end
before its last activation gradient has gone back through them. Memory and the order of work are
left out, so the bound is a little below what can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp.compiler.planner.problem import Chunks, Problem, total

__all__ = ["least_largest_load", "lower_bound", "stage_bounds"]


def lower_bound(problem: Problem) -> int:
    """In ticks. 0 where there is no stage or no micro-batch."""
    return max(stage_bounds(problem), default=0)


def stage_bounds(problem: Problem) -> list[int]:
    """The same for each stage: ticks before which its last worker cannot end."""
    if not problem.num_microbatches:
        return [0] * problem.num_stages
    return [_of_stage(problem, stage) for stage in range(problem.num_stages)]


def least_largest_load(costs: Sequence[int], count: int) -> int:
    """The smallest time in which workers that take `costs` each can do `count` pieces together."""
    low, high = 0, min(costs) * count
    while low < high:
        middle = (low + high) // 2
        if sum(middle // cost if cost else count for cost in costs) >= count:
            high = middle
        else:
            low = middle + 1
    return low


def _of_stage(problem: Problem, stage: int) -> int:
    rows = [chunks for row in problem.replicas if (chunks := row.chunks[stage]) is not None]
    count = len(problem.replicas) * problem.num_microbatches
    before = _through(problem, stage, lambda chunks: chunks.forward)
    all_work = least_largest_load([total(chunks) for chunks in rows], count)
    if not problem.split:
        return before + all_work + _through(problem, stage, _backward)
    urgent = [chunks.forward + chunks.backward_input for chunks in rows]
    back = _through(problem, stage, lambda chunks: chunks.backward_input)
    first = [chunks for row in problem.replicas if (chunks := row.chunks[0]) is not None]
    last_w = min(chunks.backward_weight for chunks in (first if stage else rows))
    return before + max(all_work, least_largest_load(urgent, count) + back + last_w)


def _through(problem: Problem, stage: int, ticks: Callable[[Chunks], int]) -> int:
    """The shortest way of one micro-batch through the stages before `stage`, transfers included."""
    way = 0
    for before in range(stage):
        crossing = (problem.crossing[before],) if len(problem.replicas) > 1 else ()
        edges = (row.edges[before] for row in problem.replicas)
        way += min((*edges, *crossing))
        way += min(ticks(c) for row in problem.replicas if (c := row.chunks[before]) is not None)
    return way


def _backward(chunks: Chunks) -> int:
    return chunks.backward_input + chunks.backward_weight
