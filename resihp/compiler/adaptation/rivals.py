"""What the published policies would plan, timed beside our own: so that none is ever faster.

Their placings are starting points of the search too, but there they compete with others for its
budget and by what is planned. Here each is simulated that can be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from resihp.compiler.adaptation.emit import lacking_bytes, lowered
from resihp.compiler.adaptation.layouts import Layout, kept_layout, left_of, num_holders
from resihp.compiler.adaptation.lowering import Found
from resihp.compiler.adaptation.problems import problem_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.carriers import carriers_of, round_robin
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import GREEDY, Placing, Planned, Style
from resihp.compiler.planner.problem import TICK_S, Problem
from resihp.compiler.planner.warmup import best_order_for_delays
from resihp.compiler.simulate import simulate

__all__ = ["best_play", "fastest_rival"]

_MOST_CHUNKS = 1_500
"""Chunks of work of a play of jobs whose rivals are planned too."""
_NEARLY = 1.1
"""Plans may simulate in less than planned, where the slowest hop between replicas counts."""
_STYLES = (GREEDY, Style(overrun=0.0), Style(overrun=0.5))


class _Rival(NamedTuple):
    name: str
    layout: Layout
    planned: Planned


def fastest_rival(situation: Situation, reached_s: float, least_holders: int) -> Found | None:
    """The plan of a published policy that takes less than `reached_s`; None where none does.

    Each layer has at least `least_holders` groups in it.
    """
    best: Found | None = None
    for rival in _rivals(situation):
        if num_holders(rival.layout.groups) < least_holders:
            continue
        if not rival.planned.complete or rival.planned.makespan * TICK_S >= _NEARLY * reached_s:
            continue
        plan = lowered(situation, rival.layout, streams_of(rival.planned))
        simulation = simulate(plan, situation.pricing, lengths=situation.all_lengths)
        if simulation.iteration_s < reached_s and not lacking_bytes(simulation):
            best, reached_s = Found(rival.name, simulation), simulation.iteration_s
    return best


def best_play(problem: Problem, placing: Placing) -> Planned:
    """The shortest of several plays of a placing; incomplete where memory never had room."""

    def plays() -> Iterator[Planned]:
        num_stages = problem.num_stages
        deep = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        bounds = dict.fromkeys((problem.in_flight, (num_stages,) * num_stages, deep, None))
        for bound, style in product(bounds, _STYLES):
            yield Engine(problem._replace(in_flight=bound), placing, style=style).run()

    return min(plays(), key=lambda planned: (not planned.complete, planned.makespan))


def _rivals(situation: Situation) -> Iterator[_Rival]:
    if not situation.profile.moves_single_stages:
        return
    kept, left = kept_layout(situation), left_of(situation)
    if left is None:
        return
    problem = problem_of(situation, left)
    if num_chunks(problem) > _MOST_CHUNKS:
        return
    apart = problem._replace(split=True)
    carriers = carriers_of(problem)
    if kept is None:
        yield _Rival("recycle", left, best_play(apart, round_robin(apart, {})))
        if carriers:
            yield _Rival("recycle+greyhound", left, best_play(apart, round_robin(apart, carriers)))
        return
    yield _Rival("adaptra", kept, best_order_for_delays(apart))
    if carriers:
        yield _Rival("greyhound", kept, best_play(problem, round_robin(problem, carriers)))
