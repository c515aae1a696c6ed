"""Automatic zero bubble: an order of F, B and W made for the costs and the memory of each stage.

The published one (Qi et al. 2024, arXiv 2401.10241) fills a pipeline greedily under eight
combinations of flags, with one cost of F, B and W for all stages. Here each stage has its own
costs, hops and memory. Orders of the named schedules and plays of the greedy player under several
bounds and styles are candidates, those that fit are timed, and small changes to the shortest are
kept as long as they do not make it longer. So the result is never longer than a named schedule
with one stage per position where that fits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.planned import GREEDY, Planned, Style
from resihp.compiler.planner.problem import Chunks, Problem
from resihp.compiler.planner.replay import ItemCosts, fits, planned_of, replay
from resihp.compiler.planner.warmup import delay_bounds
from resihp.compiler.schedules import ONE_STAGE, schedule_order
from resihp.ir.model import Op

__all__ = ["DEFAULT_BUDGET", "automatic"]

DEFAULT_BUDGET = 100_000
"""Chunks of work that are played to improve the best candidate."""
_STYLES = (GREEDY, Style(overrun=0.0), Style(overrun=0.5))
_MAX_TRIES = 1000
_NUM_GRADES = 4
_REACH = 12
"""Places that a change moves a chunk by, at most."""
_Order = tuple[tuple[Op, int, int], ...]


def automatic(
    problem: Problem, costs: ItemCosts | None = None, *, budget: int = DEFAULT_BUDGET
) -> Planned:
    """The shortest order that was found for a pipeline, one replica.

    `costs` are those of single micro-batches where they differ: orders are made for the nominal
    ones of `problem` and chosen by these. B and W are apart, whatever `problem` says. `budget`
    bounds the work of improving, so that the same problem always gives the same order. The result
    is incomplete where nothing fits into memory.
    """
    assert len(problem.replicas) == 1, "replicas run apart: plan them one by one"
    assert all(chunks is not None for chunks in problem.replicas[0].chunks)
    problem = problem._replace(split=True)
    best: Planned | None = None
    floor = lower_bound(problem) if costs is None else 0
    for planned in _candidates(problem):
        makespan = replay(problem, planned, costs)
        assert makespan is not None, "what ran at some costs runs at all of them"
        planned = planned._replace(makespan=makespan)
        if best is None or _rank(planned) < _rank(best):
            best = planned
        if best.complete and best.makespan == floor:
            return best
    assert best is not None
    if not best.complete:
        return best
    num_chunks = sum(map(len, best.orders[0]))
    return _improved(problem, best, costs, min(_MAX_TRIES, budget // max(num_chunks, 1)))


def _rank(planned: Planned) -> tuple[bool, int]:
    return not planned.complete, planned.makespan


def _candidates(problem: Problem) -> Iterator[Planned]:
    """Orders that are made for the true costs, and some for equal ones; their times are not all
    those of `problem`."""
    for kind in ONE_STAGE:
        known = planned_of(
            problem, schedule_order(kind, problem.num_stages, problem.num_microbatches)
        )
        if known is not None:
            yield known
    bounds = _bounds(problem)
    for style, bound in product(_STYLES, bounds):
        yield Engine(problem._replace(in_flight=bound), {}, style=style).run()
    for bound in bounds:
        yield Engine(_evened(problem)._replace(in_flight=bound), {}).run()


def _bounds(problem: Problem) -> list[tuple[int, ...] | None]:
    """From the warm-ups of 1F1B in even steps to those of ZB-H2, deeper where hops take long."""
    num_stages = problem.num_stages
    most = dict.fromkeys(
        num_stages + part * (num_stages - 1) // _NUM_GRADES for part in range(_NUM_GRADES + 1)
    )
    graded = [_graded(num_stages, first) for first in most]
    flat = (num_stages,) * num_stages
    return list(dict.fromkeys([problem.in_flight, *graded, flat, *delay_bounds(problem), None]))


def _graded(num_stages: int, first: int) -> tuple[int, ...]:
    """From `first` micro-batches in flight down to one, in steps that are as even as can be."""
    steps = max(num_stages - 1, 1)
    return tuple(1 + (first - 1) * (steps - stage) // steps for stage in range(num_stages))


def _evened(problem: Problem) -> Problem:
    """The median costs everywhere, as the published order is made for."""
    row = problem.replicas[0]
    held = [chunks for chunks in row.chunks if chunks is not None]
    middle = Chunks(*(sorted(ticks)[len(ticks) // 2] for ticks in zip(*held, strict=True)))
    return problem._replace(replicas=(row._replace(chunks=(middle,) * len(held)),))


def _improved(problem: Problem, best: Planned, costs: ItemCosts | None, tries: int) -> Planned:
    """Move single chunks to other places of their queue, and keep what does not make it longer."""
    rng = random.Random(problem.num_microbatches)
    for _ in range(tries):
        orders = list(best.orders[0])
        stage = rng.randrange(len(orders))
        changed = _changed(orders[stage], rng)
        if changed is None:
            continue
        orders[stage] = changed
        other = best._replace(orders={0: tuple(orders)})
        if not fits(problem, other):
            continue
        makespan = replay(problem, other, costs)
        if makespan is not None and makespan <= best.makespan:
            best = other._replace(makespan=makespan)
    return best


def _changed(order: _Order, rng: random.Random) -> _Order | None:
    """One chunk earlier or later; None where a B would come before its F or a W before its B."""
    queue = [op for op, _, _ in order]
    index = rng.randrange(len(queue))
    queue.insert(max(0, index + rng.randint(-_REACH, _REACH)), queue.pop(index))
    done = dict.fromkeys(Op, 0)
    changed: list[tuple[Op, int, int]] = []
    for op in queue:
        changed.append((op, -1, done[op]))
        done[op] += 1
        if not done[Op.F] >= done[Op.B] + done[Op.BW] or not done[Op.B] >= done[Op.W]:
            return None
    return tuple(changed)
