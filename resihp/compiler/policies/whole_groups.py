"""What the baselines share: a TP group is one worker, and gone when one of its ranks is.

A slow member slows its whole group. Orders come of the same player as ours, for several bounds on
what is in flight and the best is taken, so that a baseline is not held back by its order.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Layout, Situation, problem_of
from resihp.compiler.adaptation.emit import check, lacking_bytes, lowered
from resihp.compiler.adaptation.layouts import kept_layout, left_of, on_layout
from resihp.compiler.adaptation.rivals import best_play
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import Planned
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
