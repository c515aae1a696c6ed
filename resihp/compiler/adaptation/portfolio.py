"""The adaptation: many candidates are planned, the best is lowered, verified and simulated.

Candidates are compared by what the planner predicts and the reduction of gradients. "No change" is
simulated too, wherever it can run, and stays unless the best is faster: an adaptation never makes
an iteration longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec

from resihp.compiler.adaptation.candidates import candidates
from resihp.compiler.adaptation.decision import CANNOT_WIN, PROMISES_LITTLE, Considered, Decision
from resihp.compiler.adaptation.emit import check
from resihp.compiler.adaptation.entries import Entry
from resihp.compiler.adaptation.layouts import gains_holders, kept_layout, num_holders, on_layout
from resihp.compiler.adaptation.lowering import (
    Found,
    Outcome,
    best_found,
    may_be_faster,
    simulated_s,
)
from resihp.compiler.adaptation.named_order import named_outcomes
from resihp.compiler.adaptation.planning import plan_once, plan_well
from resihp.compiler.adaptation.problems import TICK_S
from resihp.compiler.adaptation.rivals import fastest_rival
from resihp.compiler.adaptation.shortage import memory_shortage
from resihp.compiler.adaptation.situation import WHOLE_MICROBATCHES, Situation
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Planned
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.warmup import best_order_for_delays, shares_within
from resihp.compiler.sources import require_state
from resihp.compiler.state_traffic import state_traffic
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Plan

__all__ = ["DEFAULT_BUDGET", "UNCHANGED", "adapt"]

DEFAULT_BUDGET = 20_000
"""Chunks of work that are played for the best candidates beyond the first play of each."""
UNCHANGED = "no change"
"""Name of the candidate that leaves everything as it is."""
_CHEAP_CHUNKS = 3_000
"""Chunks of work of a play that takes no time worth mentioning."""
_DELAY_CHUNKS = 100_000
"""Chunks of work that are played in orders for slow links, of each of the best candidates."""
_LEAST_GAIN = 0.005
"""Share of an iteration that makes further plays of a large job worth while."""
_NUM_REFINED = 2
"""Candidates that get more than one play."""


def adapt(
    situation: Situation, *, budget: int = DEFAULT_BUDGET, least_gain: float = 0.0
) -> Decision:
    """The best verified plan that was found for `situation`.

    `budget` bounds the planner's work, in chunks that are played, so that the same situation
    always gives the same plan. What saves less than `least_gain`, a share of the unchanged plan's
    iteration, is not worth the change.

    Raises NoFeasiblePlan where state is gone with its last holder or no plan fits into memory.
    """
    if not situation.has_one_stage_each:
        situation = situation.with_profile(WHOLE_MICROBATCHES)
    require_state(situation.state)
    unchanged = _unchanged(situation)
    no_change_s = None if unchanged is None else unchanged.iteration_s
    is_short = unchanged is not None and _lacks_holders(situation, unchanged.plan)
    goal_s = None if is_short else no_change_s
    best, considered, num_played = _found(situation, goal_s, budget)
    if unchanged is None and best is None and situation.previous.memory_bytes is not None:
        best, considered, num_played = _found(situation.without_reserve(), no_change_s, budget)
    if unchanged is None and best is None:
        best, considered = _by_name(situation, considered)
    if best is None and goal_s is None and situation.min_holders > 1:
        fewer = situation.with_min_holders(situation.min_holders - 1)
        return adapt(fewer, budget=budget, least_gain=least_gain)
    if unchanged is not None and best is not None:
        saved = 1 - best.iteration_s / unchanged.iteration_s
        is_safer = gains_holders(situation, unchanged.plan, best.checked.plan)
        if not is_safer and (saved <= 0 or saved < least_gain):
            best = None
    return _decided(situation, unchanged, best, considered, num_played)


def _lacks_holders(situation: Situation, plan: Plan) -> bool:
    return num_holders(plan.groups) < situation.min_holders


class _Found(NamedTuple):
    """The best candidate, if any fits; what is told of all; how many plans were played."""

    best: Outcome | None
    considered: list[Considered]
    num_played: int


def _found(situation: Situation, no_change_s: float | None, budget: int) -> _Found:
    found = candidates(situation)
    if not situation.has_one_stage_each:
        return _Found(*named_outcomes(situation, found), len(found))
    entries = [entry for each in found for entry in Entry.of(situation, each)]
    best, num_played = _best(situation, entries, no_change_s, budget)
    rival = fastest_rival(
        situation,
        (no_change_s or inf) if best is None else best.iteration_s,
        min(situation.min_holders, *(num_holders(each.layout.groups) for each in found)),
    )
    ranked = sorted(entries, key=_rank)
    told = {entry.name: entry for entry in reversed(ranked)}
    considered = [each.considered(situation) for each in ranked if told[each.name] is each]
    if rival is not None:
        best = rival
        considered.insert(0, rival.considered(situation))
    return _Found(None if best is None else best.outcome(situation), considered, num_played)


def _by_name(
    situation: Situation, considered: Sequence[Considered]
) -> tuple[Outcome | None, list[Considered]]:
    """The last resort where memory is nearly full: whole replicas in the order of a schedule.

    Each runs its own micro-batches first and then runs of others, so fewer sums of gradients wait
    for each other than where moved ones lie between its own.
    """
    whole = situation.with_profile(WHOLE_MICROBATCHES)
    try:
        best, also = named_outcomes(whole, candidates(whole))
    except NoFeasiblePlan:
        return None, list(considered)  # no replica can be whole
    return best, [*also, *considered]


def _best(
    situation: Situation, entries: Sequence[Entry], no_change_s: float | None, budget: int
) -> tuple[Found | None, int]:
    """The best plan that is faster than no change, and how many were played.

    Candidates are left out against what others are planned to take. Where those turn out to take
    longer, or not to fit, what they were preferred to is played after all.
    """
    best: Found | None = None
    reached_s = inf if no_change_s is None else no_change_s
    num_played = 0
    left = list(entries)
    while left:
        num_played += _plan(situation, left, budget, reached_s)
        ranked = sorted((entry for entry in left if entry.makespan_s), key=_rank)
        found, reached_s = best_found(situation, ranked, reached_s)
        best = found or best
        open_ones = [e for e in left if not e.is_over and may_be_faster(e, reached_s)]
        if len(open_ones) == len(left) and not ranked:
            break
        left = open_ones
    return best, num_played


class _Unchanged(NamedTuple):
    """The plan before and its time today."""

    plan: Plan
    iteration_s: float


def _unchanged(situation: Situation) -> _Unchanged | None:
    """The plan before as it is, where nobody in it is lost."""
    layout = kept_layout(situation)
    if layout is None:
        return None
    plan = on_layout(situation, layout)
    return _Unchanged(plan, simulated_s(situation, plan))


def _rank(entry: Entry) -> tuple[float, float, int]:
    """By what the planner predicts; those that were not played by their bounds, at the end."""
    return entry.makespan_s or inf, entry.bound_s, len(entry.candidate.changes)


def _plan(situation: Situation, entries: Sequence[Entry], budget: int, reached_s: float) -> int:
    """Play each entry that can be the best once, then the best ones more; how many were played.

    Those that cannot take less than `reached_s` are left out.
    """
    played: dict[tuple[Problem, bool], Planned | None] = {}
    best_s = min((e.makespan_s for e in entries if e.makespan_s), default=reached_s)
    best_s = min(best_s, reached_s)
    for entry in sorted((entry for entry in entries if entry.planned is None), key=_promise):
        if entry.least_s >= best_s * (1 - _slack(entry.problem)):
            continue
        key = entry.problem, entry.moves
        if key not in played:
            limit = None if best_s == inf else int((best_s - entry.ends.least_s) / TICK_S)
            played[key] = plan_once(entry.problem, situation.profile, move=entry.moves, limit=limit)
        entry.planned = played[key]
        if entry.planned is None:
            entry.given_up_s = best_s
        best_s = min(best_s, entry.makespan_s or inf)
    num_played = len(played)
    for entry in _worth_refining(entries):
        planned, count = plan_well(
            entry.problem,
            situation.profile,
            move=entry.moves,
            budget=budget // _NUM_REFINED,
            least_plays=1,
            known=entry.planned,
        )
        num_played += count
        entry.offer(planned)
        if situation.pricing.health.links:
            shares = shares_within(_DELAY_CHUNKS, entry.problem, planned.placing)
            entry.offer(
                best_order_for_delays(
                    entry.problem, planned.placing, shares=shares, known=entry.planned
                )
            )
            num_played += len(shares)
    return num_played


def _promise(entry: Entry) -> float:
    """By their bounds; what leaves ranks idle only where it is worth it."""
    return entry.bound_s * (1 + _LEAST_GAIN * entry.candidate.gives_up)


def _slack(problem: Problem) -> float:
    """The gain for which a further play is not worth its time."""
    return 0.0 if num_chunks(problem) < _CHEAP_CHUNKS else _LEAST_GAIN


def _worth_refining(entries: Sequence[Entry]) -> list[Entry]:
    """Of the best problems the entry that leaves the planner free, best first."""
    ranked = sorted((entry for entry in entries if entry.planned is not None), key=_rank)
    problems = list(dict.fromkeys(entry.problem for entry in ranked))[:_NUM_REFINED]
    return [next(entry for entry in entries if entry.problem == each) for each in problems]


def _decided(
    situation: Situation,
    unchanged: _Unchanged | None,
    best: Outcome | None,
    considered: Sequence[Considered],
    num_played: int,
) -> Decision:
    """The record of `best`, or of no change where there is none."""
    if unchanged is not None and best is None:
        best = Outcome(UNCHANGED, check(situation, unchanged.plan), unchanged.iteration_s)
    if best is None:
        raise NoFeasiblePlan(memory_shortage(situation))
    told = [msgspec.structs.replace(each, why=each.why or _why(each, best)) for each in considered]
    if unchanged is not None:
        row = Considered(
            name=UNCHANGED, num_groups_changed=0, iteration_s=unchanged.iteration_s, why=""
        )
        is_safer = gains_holders(situation, unchanged.plan, best.checked.plan)
        fewer = ", fewer holders of a layer" if is_safer else ""
        told.append(msgspec.structs.replace(row, why=_why(row, best) + fewer))
    plan = best.checked.plan
    traffic = state_traffic(situation.held, plan, situation.pricing)
    return Decision(
        plan=plan,
        text=best.checked.text,
        chosen=best.name,
        iteration_s=best.iteration_s,
        no_change_s=None if unchanged is None else unchanged.iteration_s,
        moved_bytes=traffic.num_bytes + traffic.read_bytes,
        moved_s=traffic.seconds,
        considered=tuple(told),
        num_played=num_played,
    )


def _why(each: Considered, best: Outcome) -> str:
    """Why a candidate that could have been taken was or was not."""
    if each.name == best.name and each.iteration_s == best.iteration_s:
        return "chosen"
    if each.iteration_s is None and each.makespan_s is None:
        if each.is_played:
            return "memory never has room for all of it"
        is_bound = each.bound_s is not None and each.bound_s >= best.iteration_s
        return CANNOT_WIN if is_bound else PROMISES_LITTLE
    time_s = each.iteration_s or each.makespan_s or 0.0
    how = "simulated" if each.iteration_s is not None else "planned"
    return f"{how} {100 * (time_s / best.iteration_s - 1):+.1f} %"
