"""Growing back: the plan for devices that have returned, if it is time and worth it.

Ranks that returned are offered to the adaptation as if they had never been away, but without any
state. It fills groups up to their degree, forms dropped groups and replicas anew and repartitions
layers, whatever is fastest; `hysteresis` says whether to switch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from resihp.compiler.adaptation.decision import Decision
from resihp.compiler.adaptation.hysteresis import Patience, Trust, Verdict, may_grow
from resihp.compiler.adaptation.layouts import gains_holders
from resihp.compiler.adaptation.portfolio import DEFAULT_BUDGET, UNCHANGED, adapt
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Plan

__all__ = ["Growth", "grow_back"]


class Growth(NamedTuple):
    """Whether a plan grows, and to which."""

    verdict: Verdict
    decision: Decision | None
    """The larger plan; None where the present one stays."""


def grow_back(
    previous: Plan,
    pricing: Pricing,
    returned: Collection[int],
    *,
    trust: Trust,
    patience: Patience,
    iteration: int,
    budget: int = DEFAULT_BUDGET,
) -> Growth:
    """What to do after `iteration` of `previous`, all of whose members are alive.

    `returned` are ranks that `previous` has lost and that are back; those that are not trusted yet
    are left out. Ranks that are standby may be taken too, since their speeds may have changed.

    Raises UserError for ranks that `previous` has not lost.
    """
    waits = {rank: trust.wait(rank, iteration, patience) for rank in sorted(returned)}
    trusted = [rank for rank, wait in waits.items() if not wait]
    if waits and not trusted:
        rank = min(waits, key=lambda rank: waits[rank])
        reason = f"rank {rank} must be good for {waits[rank]} more iterations"
        return Growth(Verdict(grow=False, reason=reason), None)
    situation = Situation(previous, pricing, returned=trusted)
    decision = adapt(situation, budget=budget)
    if decision.chosen == UNCHANGED:
        return Growth(Verdict(grow=False, reason="no larger plan is faster"), None)
    assert decision.no_change_s is not None, "a member of the present plan is lost"
    if gains_holders(situation, previous, decision.plan):
        reason = "a layer that lacks holders gets more"
        return Growth(Verdict(grow=True, reason=reason), decision)
    verdict = may_grow(
        patience,
        trust,
        iteration,
        ranks=trusted,
        now_s=decision.no_change_s,
        grown_s=decision.iteration_s,
        transfer_s=decision.moved_s,
    )
    return Growth(verdict, decision if verdict.grow else None)
