"""A time that no plan of a problem can beat: the work of each stage, shared as evenly as can be.

A stage cannot begin before a forward has come through all stages before it, nor be the last to end
before its last activation gradient has gone back through them. Memory and the order of work are
left out, so the bound is a little below what can be reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resihp.compiler.planner.problem import Chunks, Problem, total

__all__ = ["least_largest_load", "lower_bound", "stage_bounds"]


def lower_bound(problem: Problem) -> int:
    """In ticks. 0 where there is no stage or no micro-batch."""
    return max(stage_bounds(problem), default=0)


def stage_bounds(problem: Problem) -> list[int]:
    """Ticks before which the last worker of each stage cannot end."""
    if not problem.num_microbatches:
        return [0] * problem.num_stages
    count = len(problem.replicas) * problem.num_microbatches
    bounds, last, way = list[int](), 0, _Way(0, 0)
    first = _held(problem, 0)
    for stage in range(problem.num_stages):
        held = _held(problem, stage)
        work = _shared(held, total, count)
        bounds.append(way.forward + work)
        end = way.forward + work + way.back
        if problem.split:
            last_w = min(chunks.backward_weight for chunks in (first if stage else held))
            end = way.forward + _shared(held, _urgent, count) + way.back + last_w
        last = max(last, end)
        if stage + 1 < problem.num_stages:
            way = _further(problem, stage, held, way)
    # Gradients come back to the first stage.
    return [max(bounds[0], last), *bounds[1:]] if bounds else []


def least_largest_load(costs: Sequence[int], count: int) -> int:
    """The smallest time in which workers that take `costs` each can do `count` pieces together."""
    return _least_load(Counter(costs), count)


def _least_load(costs: Mapping[int, int], count: int) -> int:
    """The same for as many workers of each cost."""
    low, high = 0, min(costs) * count
    while low < high:
        middle = (low + high) // 2
        if sum(n * (middle // cost if cost else count) for cost, n in costs.items()) >= count:
            high = middle
        else:
            low = middle + 1
    return low


_Held = Mapping[Chunks, int]
"""How many replicas have a stage at which costs."""


class _Way(NamedTuple):
    """Ticks of the shortest way of one micro-batch through the stages before one, and back."""

    forward: int
    back: int


def _held(problem: Problem, stage: int) -> _Held:
    rows = Counter(row.chunks[stage] for row in problem.replicas)
    return {chunks: number for chunks, number in rows.items() if chunks is not None}


def _shared(held: _Held, ticks: Callable[[Chunks], int], count: int) -> int:
    costs: Counter[int] = Counter()
    for chunks, number in held.items():
        costs[ticks(chunks)] += number
    return _least_load(costs, count)


def _further(problem: Problem, stage: int, held: _Held, way: _Way) -> _Way:
    """The way through `stage` too, to the one after it."""
    crossing = (problem.crossing[stage],) if len(problem.replicas) > 1 else ()
    edge = min((*{row.edges[stage] for row in problem.replicas}, *crossing))
    backward = _backward_input if problem.split else _backward
    return _Way(
        way.forward + edge + min(chunks.forward for chunks in held),
        way.back + edge + min(map(backward, held)),
    )


def _urgent(chunks: Chunks) -> int:
    return chunks.forward + chunks.backward_input


def _backward_input(chunks: Chunks) -> int:
    return chunks.backward_input


def _backward(chunks: Chunks) -> int:
    return chunks.backward_input + chunks.backward_weight
