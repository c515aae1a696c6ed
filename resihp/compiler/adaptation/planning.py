"""Who runs which micro-batch when, on a given layout: as many plays of the planner as are worth it.

The first play of a layout tells whether it is worth more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from resihp.compiler.adaptation.situation import Profile
from resihp.compiler.planner.balance import balanced, homeless_placed
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import GREEDY, Engine, Placing, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.search import search
from resihp.compiler.planner.whole import whole_placing

__all__ = ["num_homeless", "plan_once", "plan_well"]

_STYLES = (GREEDY, Style(overrun=0.0), Style(overrun=0.5))


def plan_once(
    problem: Problem, profile: Profile, *, move: bool, limit: int | None = None
) -> Planned | None:
    """One play of the placing that promises most; it is incomplete where memory has no room.

    None once it cannot end within `limit` ticks.
    """
    placing = _placing(problem, profile, move=move)
    engine = Engine(problem._replace(in_flight=_bounds(problem)[0]), placing)
    return engine.run() if limit is None else engine.run_within(limit)


def plan_well(
    problem: Problem,
    profile: Profile,
    *,
    move: bool,
    budget: int,
    least_plays: int = 4,
    known: Planned | None = None,
) -> tuple[Planned, int]:
    """The best of several plays, about `budget` chunks of work in all, and their number.

    `known` is what `plan_once` gave.
    """
    if profile.moves_single_stages:
        return search(problem, move=move, budget=budget, least_plays=least_plays, known=known)
    placings = [_placing(problem, profile, move=move)]
    if move:
        placings.append(_placing(problem, profile, move=False))
    best, num_played = None, 0
    for style, bound, placing in product(_STYLES, _bounds(problem), placings):
        if best is not None and num_played * num_chunks(problem) > budget:
            break
        num_played += 1
        best = _better(best, Engine(problem._replace(in_flight=bound), placing, style=style).run())
    assert best is not None
    return best, num_played


def num_homeless(problem: Problem) -> int:
    """Chunks (micro-batch, stage) that no replica runs at home, since it lacks the stage."""
    lacking = sum(chunks is None for row in problem.replicas for chunks in row.chunks)
    return lacking * problem.num_microbatches


def _placing(problem: Problem, profile: Profile, *, move: bool) -> Placing:
    if not profile.moves_single_stages:
        return whole_placing(problem, move=move)
    return balanced(problem) if move else homeless_placed(problem)


def _bounds(problem: Problem) -> Sequence[tuple[int, ...] | None]:
    """None but memory, then tighter ones."""
    deep = tuple(2 * (problem.num_stages - s) - 1 for s in range(problem.num_stages))
    return list(dict.fromkeys([None, deep, problem.in_flight]))


def _better(best: Planned | None, other: Planned) -> Planned:
    if best is None:
        return other
    return min(best, other, key=lambda plan: (not plan.complete, plan.makespan, plan.num_moved))
