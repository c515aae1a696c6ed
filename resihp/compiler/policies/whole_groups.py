"""What the baselines share: a TP group is one worker, and gone when one of its ranks is.

A slow member slows its whole group. Orders come of the same player as ours, for several bounds on
what is in flight and the best is taken, so that a baseline is not held back by its order.
"""

from __future__ import annotations

from collections.abc import Iterator

from resihp.compiler.adaptation import Layout, Situation, problem_of
from resihp.compiler.adaptation.emit import check, lacking_bytes, lowered
from resihp.compiler.adaptation.layouts import kept_layout, on_layout
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import GREEDY, Placing, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.simulate import simulate

__all__ = [
    "ONE_STAGE_ONLY",
    "best_play",
    "emitted",
    "left_of",
    "no_answer_to_lost",
    "priced",
    "unchanged",
]

ONE_STAGE_ONLY = "it knows one stage per position only"
"""Of a plan with several, which goes on as it is while it can."""
_STYLES = (GREEDY, Style(overrun=0.0), Style(overrun=0.5))


def left_of(situation: Situation) -> Layout | None:
    """The groups that lost nobody, all other live ranks standby; None where a stage has none."""
    groups = tuple(g for g in situation.previous.groups if situation.lost.isdisjoint(g.ranks))
    if {group.pp for group in groups} != {group.pp for group in situation.previous.groups}:
        return None
    used = [rank for group in groups for rank in group.ranks]
    standby = tuple(sorted(situation.alive.difference(used)))
    return Layout(groups, standby, tuple(sorted(situation.lost)))


def priced(situation: Situation, layout: Layout) -> Problem | None:
    """The planner's problem; None for plans with several stages per position."""
    return problem_of(situation, layout) if situation.has_one_stage_each else None


def unchanged(situation: Situation, name: str, note: str = "nothing changes") -> Outcome:
    """The plan before, as long as it can run."""
    layout = kept_layout(situation)
    if layout is None:
        return no_answer_to_lost(situation, name)
    plan = on_layout(situation, layout)
    iteration_s = simulate(plan, situation.pricing).iteration_s
    return Outcome(name=name, iteration_s=iteration_s, plan=plan, note=note)


def no_answer_to_lost(situation: Situation, name: str) -> Outcome:
    """For policies that know no lost ranks."""
    lost = sorted(situation.lost.intersection(situation.previous.active_ranks))
    return Outcome.stops(name, f"rank {lost[0]} is lost and the policy has no answer to that")


def best_play(problem: Problem, placing: Placing) -> Planned:
    """The shortest of several plays of a placing; incomplete where memory never had room."""

    def plays() -> Iterator[Planned]:
        num_stages = problem.num_stages
        deep = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        for bound in dict.fromkeys((problem.in_flight, (num_stages,) * num_stages, deep, None)):
            for style in _STYLES:
                yield Engine(problem._replace(in_flight=bound), placing, style=style).run()

    return min(plays(), key=lambda planned: (not planned.complete, planned.makespan))


def emitted(
    situation: Situation, layout: Layout, planned: Planned, name: str, note: str
) -> Outcome:
    """The plan lowered, verified and simulated."""
    if not planned.complete:
        return Outcome.stops(name, "what is left does not fit into memory")
    plan = lowered(situation, layout, streams_of(planned))
    simulation = simulate(plan, situation.pricing)
    if lacking_bytes(simulation):
        return Outcome.stops(name, "the plan needs more memory than a device has")
    checked = check(situation, plan)
    return Outcome(name=name, iteration_s=simulation.iteration_s, plan=checked.plan, note=note)
