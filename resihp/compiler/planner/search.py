"""The best of several plays: placings, bounds and styles first, then small changes to the best.

What one play costs is known beforehand (chunks of work that are played), so the search has a
budget in chunks, not in seconds: the same problem always gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from resihp.compiler.planner.algorithm1 import progress_rule
from resihp.compiler.planner.balance import balanced, homeless_placed
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import GREEDY, Item, Planned, Style
from resihp.compiler.planner.problem import Problem

__all__ = ["DEFAULT_BUDGET", "num_chunks", "search"]

DEFAULT_BUDGET = 20_000
"""Chunks of work that are played in all beyond the first four plays."""
_NEVER = 1 << 62
_STYLES = (GREEDY, Style(overrun=0.0), Style(overrun=0.5))


def search(
    problem: Problem, *, move: bool = True, budget: int = DEFAULT_BUDGET
) -> tuple[Planned, int]:
    """The shortest complete plan that was found, and how many plans were played.

    `move` False leaves everything at home that has one. The plan is incomplete where memory
    never had room in any play.
    """
    best, num_played = None, 0
    cost = num_chunks(problem)
    left = budget + 4 * cost
    for engine in _plays(problem, move=move):
        if num_played >= 4 and left < cost:
            break
        left -= cost
        num_played += 1
        best = _better(best, engine.run_within(_limit(best)))
    assert best is not None
    if move and best.complete:
        tries = max(0, min(300, left // cost))
        best = _climb(problem, best, tries)
        num_played += tries
    return best, num_played


def num_chunks(problem: Problem) -> int:
    """Chunks of work of one play, replicas that are alike counted once."""
    distinct = len(set(problem.replicas))
    return 3 * distinct * problem.num_stages * problem.num_microbatches


def _limit(best: Planned | None) -> int:
    """Plays that take longer than this cannot win."""
    return best.makespan if best is not None and best.complete else _NEVER


def _better(best: Planned | None, other: Planned | None) -> Planned | None:
    """Complete before incomplete, then the shorter, then the one that moves less."""
    if best is None or other is None:
        return best or other
    return min(best, other, key=lambda plan: (not plan.complete, plan.makespan, plan.num_moved))


def _plays(problem: Problem, *, move: bool) -> Iterator[Engine]:
    """From the most to the least promising."""
    stay = homeless_placed(problem)
    placings = [stay]
    if move:
        placings = [balanced(problem), stay, balanced(problem, spaced=False)]
    bounds = _bounds(problem)
    for placing in placings:
        yield Engine(problem._replace(in_flight=bounds[0]), placing)
    if move:
        yield Engine(problem._replace(in_flight=bounds[0]), stay, progress_rule())
    for style, bound in product(_STYLES, bounds):
        for placing in placings:
            if (style, bound) != (GREEDY, bounds[0]):
                yield Engine(problem._replace(in_flight=bound), placing, style=style)


def _bounds(problem: Problem) -> list[tuple[int, ...] | None]:
    """The schedule's own bound, then looser ones; memory bounds all of them."""
    num_stages = problem.num_stages
    deep = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return list(dict.fromkeys([problem.in_flight, (num_stages,) * num_stages, deep, None]))


def _climb(problem: Problem, best: Planned, tries: int) -> Planned:
    """Give single chunks to other replicas, at random, and keep what does not make it longer."""
    rng = random.Random(problem.num_microbatches)
    bounds = _bounds(problem)
    for _ in range(tries):
        placing = _changed(problem, best.placing, rng)
        if placing is None:
            return best
        bound, style = rng.choice(bounds), rng.choice(_STYLES)
        engine = Engine(problem._replace(in_flight=bound), placing, style=style)
        other = engine.run_within(best.makespan)
        if other is not None and other.complete:
            best = other
    return best


def _changed(
    problem: Problem, placing: dict[Item, dict[int, int]], rng: random.Random
) -> dict[Item, dict[int, int]] | None:
    """One chunk elsewhere; None where no stage has two replicas."""
    holders = [
        [d for d, row in enumerate(problem.replicas) if row.chunks[stage] is not None]
        for stage in range(problem.num_stages)
    ]
    stages = [stage for stage, found in enumerate(holders) if len(found) > 1]
    if not stages:
        return None
    stage = rng.choice(stages)
    item = rng.randrange(len(problem.replicas)), rng.randrange(problem.num_microbatches)
    replica = rng.choice(holders[stage])
    changed = {key: dict(where) for key, where in placing.items()}
    where = changed.setdefault(item, {})
    if replica == item[0]:
        where.pop(stage, None)
    else:
        where[stage] = replica
    if not where:
        del changed[item]
    return changed
