"""The best of several plays: placings, bounds and styles first, then small changes to the best.

What one play costs is known beforehand (chunks of work that are played), so the search has a
budget in chunks, not in seconds: the same problem always gives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product

from resihp.compiler.planner.algorithm1 import progress_rule
from resihp.compiler.planner.balance import balanced, homeless_placed
from resihp.compiler.planner.carriers import carriers_of, round_robin
from resihp.compiler.planner.climb import climb
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.named import named_plans
from resihp.compiler.planner.planned import GREEDY, Item, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.tidy import Ways, tidied

__all__ = ["DEFAULT_BUDGET", "search"]

DEFAULT_BUDGET = 20_000
"""Chunks of work that are played in all beyond the first four plays."""
_NEVER = 1 << 62
_STYLES = (
    GREEDY,
    Style(overrun=0.0),
    Style(overrun=0.5),
    Style(forward_first=True),
    Style(overrun=0.0, forward_first=True),
)
_MOST = 8
"""Times the budget that a play beyond the least number may take alone."""
_MOST_TRIES = 900
"""Of small problems, whose plays cost next to nothing."""
_TINY = 500
_MORE_TRIES = 3
"""Of problems so tiny, most tries are given up as soon as they show to be longer."""
_CLIMB_SHARE = 2
"""One part in so many of the budget is kept for small changes,"""
_LEAST_CLIMB = 20
"""if it is enough for as many."""
_TIDY_SHARE = 2
"""Moves are undone with one part in so many of the budget, which comes on top."""
_Placing = dict[Item, dict[int, int]]


def search(
    problem: Problem,
    *,
    move: bool = True,
    budget: int = DEFAULT_BUDGET,
    least_plays: int = 4,
    known: Planned | None = None,
) -> tuple[Planned, int]:
    """The shortest complete plan that was found, and how many plans were played.

    `move` False leaves everything at home that has one. The plan is incomplete where memory
    never had room in any play. `known` is what came of the first play, if it is over; beyond it
    at least `least_plays` are played. Half as many chunks more may be played to undo moves that do
    not pay.
    """
    assert not problem.kept, "the search changes who runs what of all micro-batches"
    best, num_played = _searched(problem, move, budget, least_plays, known)
    for named in named_plans(problem, budget):
        best = min(named, best, key=_rank)
    best, num_tidied = tidied(problem, best, Ways(_bounds(problem), _STYLES), budget // _TIDY_SHARE)
    return best, num_played + num_tidied


def _searched(
    problem: Problem, move: bool, budget: int, least_plays: int, known: Planned | None
) -> tuple[Planned, int]:
    best, num_played = known, 0
    floor, cost = lower_bound(problem), num_chunks(problem)
    if known is not None and known.complete and known.makespan <= floor:
        return known, 0
    left = budget + least_plays * cost
    for_climb = budget // _CLIMB_SHARE
    if not move or for_climb < _LEAST_CLIMB * cost:
        for_climb = 0
    for engine in islice(_plays(problem, move=move), known is not None, None):
        if num_played >= least_plays and left < cost + for_climb:
            break
        if num_played >= least_plays and num_chunks(problem, engine.placing) > _MOST * budget:
            continue
        left -= cost
        num_played += 1
        best = _better(best, engine.run_within(_limit(best)))
        if best is not None and best.complete and best.makespan <= floor:
            return best, num_played
    assert best is not None
    if move and best.complete and num_chunks(problem, best.placing) <= _MOST * budget:
        more = _MORE_TRIES if cost <= _TINY else 1
        tries = max(0, min(_MOST_TRIES, more * left // cost))
        best = climb(problem, best, _bounds(problem), _STYLES, tries, floor)
        num_played += tries
    return best, num_played


def _limit(best: Planned | None) -> int:
    """Plays that take longer than this cannot win."""
    return best.makespan if best is not None and best.complete else _NEVER


def _better(best: Planned | None, other: Planned | None) -> Planned | None:
    """Complete before incomplete, then the shorter, then the one that moves less."""
    if best is None or other is None:
        return best or other
    return min(best, other, key=_rank)


def _rank(planned: Planned) -> tuple[bool, int, int]:
    return not planned.complete, planned.makespan, planned.num_moved


def _plays(problem: Problem, *, move: bool) -> Iterator[Engine]:
    """From the most to the least promising."""
    stay = homeless_placed(problem)
    placings = [stay]
    if move:
        placings = _distinct([balanced(problem), stay, balanced(problem, spaced=False)])
    bounds = _bounds(problem)
    for placing in placings:
        yield Engine(problem._replace(in_flight=bounds[0]), placing)
    if move:
        yield Engine(problem._replace(in_flight=bounds[0]), stay, progress_rule())
    published = _published(problem) if move else []
    for style, bound in product(_STYLES, bounds):
        is_played = (style, bound) == (GREEDY, bounds[0])
        for placing in published if is_played else [*placings, *published]:
            yield Engine(problem._replace(in_flight=bound), placing, style=style)


def _distinct(placings: Iterable[_Placing]) -> list[_Placing]:
    """Where only links are slow nothing moves, and all are the same."""
    found: list[_Placing] = []
    for placing in placings:
        if placing not in found:
            found.append(placing)
    return found


def _published(problem: Problem) -> list[dict[Item, dict[int, int]]]:
    """Placings of other systems: so that none of them is ever better."""
    carriers = carriers_of(problem)
    found = [round_robin(problem, {})]
    if carriers:
        found.append(round_robin(problem, carriers))
    return [placing for placing in found if placing]


def _bounds(problem: Problem) -> list[tuple[int, ...] | None]:
    """None but memory, which is mostly best, then tighter ones, the schedule's own among them."""
    num_stages = problem.num_stages
    deep = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return list(dict.fromkeys([None, deep, problem.in_flight, (num_stages,) * num_stages]))
