"""Between a plan and its deployment: a quorum of nodes has it in its journals first.

So no generation ever has two plans, and whoever takes over knows which one may be running.
"""

from __future__ import annotations

from typing import NamedTuple

from resihp.monitor.actions import Decide, PlanMade
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.opening import Opening
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.planner import VerifiedPlan
from resihp.wire.messages import Commit
from resihp.wire.quorum import Entry

__all__ = ["Deciding"]


class _Proposal(NamedTuple):
    plan: VerifiedPlan
    cause: str
    commit: Commit


class Deciding:
    """Has the next generation decided on, then opened."""

    def __init__(self, core: Core, opening: Opening) -> None:
        self._core = core
        self._opening = opening
        self._proposal: _Proposal | None = None
        self._refusals: dict[int, str] = {}

    def propose(self, plan: VerifiedPlan, cause: str, commit: Commit) -> None:
        """Ask for `plan` to be the one of the present generation, from `commit` on."""
        core = self._core
        core.plan = plan
        core.enter(Phase.PROPOSING)
        self._proposal = _Proposal(plan, cause, commit)
        self._refusals.clear()
        core.begun = core.generation, commit.version
        entry = Entry(
            term=0,
            generation=core.generation,
            electors=(),
            voters=(),
            plan=plan.text,
            steady_plan=_steady(plan),
            waits_for_boundary=plan.waits_for_boundary,
            base=core.base,
            base_plan=core.base_plan.text if core.base_plan is not None else "",
            base_steady_plan=_steady(core.base_plan),
            commit=commit,
            alive=tuple(sorted(core.alive)),
            lost=tuple(core.lost),
            cause=cause,
        )
        core.do(Decide(entry))

    def decided(self, generation: int) -> None:
        """A quorum has it; too late where a rank was lost meanwhile."""
        core = self._core
        if core.phase is not Phase.PROPOSING or generation != core.generation:
            return
        assert self._proposal is not None
        plan, cause, commit = self._proposal
        core.do(PlanMade(core.generation, plan.text, cause, _steady(plan)))
        if plan.decision is not None:
            core.log("decision", generation=core.generation, **plan.decision)
        self._opening.deploy(plan, commit)

    def refused(self, node: int, why: str) -> None:
        """The monitor of `node` cannot write its journal."""
        self._refusals[node] = why

    def undecided(self, waited_s: float) -> tuple[str, Commit]:
        """Why the plan did not get its quorum in time, and what it would have begun with."""
        assert self._proposal is not None
        said = [self._refusals[node] for node in sorted(self._refusals)]
        why = "; ".join(said) or "no quorum of nodes answered"
        reason = f"generation {self._core.generation} is undecided after {waited_s:.0f} s: {why}"
        return reason, self._proposal.commit


def _steady(plan: VerifiedPlan | None) -> str:
    """The text of the plan that follows `plan`; empty where none does."""
    return "" if plan is None or plan.steady is None else plan.steady.text
