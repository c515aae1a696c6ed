"""Which plan the next generation runs, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.errors import NoFeasiblePlan, PlanRejected
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.deciding import Deciding
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.incident import listed
from resihp.monitor.planner import Planner, VerifiedPlan
from resihp.wire.messages import Commit, StepRecord

__all__ = ["Planning"]


class Planning:
    """Makes a plan for those who are alive, and has it decided on."""

    def __init__(
        self, core: Core, planner: Planner, rejoining: Rejoining, deciding: Deciding
    ) -> None:
        self._core = core
        self._rejoining = rejoining
        self._planner = planner
        self._deciding = deciding

    def go_on(
        self,
        cause: str,
        version: int,
        record: StepRecord | None,
        updates: int,
        snapshots: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Open a generation from `version`, whose last step is `record`.

        `snapshots`: of lost ranks, by the live ones that can read them.
        """
        core = self._core
        growth = self._rejoining.admit()
        try:
            if growth is None:
                plan = self._make(version, snapshots)
            else:
                plan, cause = growth.plan, f"{listed(sorted(growth.ranks))} back: {growth.why}"
        except NoFeasiblePlan as error:
            core.stop(self._no_plan(str(error)), NoFeasiblePlan.exit_code)
            return
        except PlanRejected as error:
            core.log("plan_rejected", findings=[d.code for d in error.diagnostics])
            core.stop(str(error), PlanRejected.exit_code)
            return
        if core.generation == 0:
            core.generation = 1
        commit = Commit(version=version, updates=updates, record=record)
        self._deciding.propose(plan, cause, commit)

    def _make(self, version: int, snapshots: Mapping[int, tuple[int, ...]] | None) -> VerifiedPlan:
        core = self._core
        previous = core.base_plan or self._planner.initial()
        lasting = previous.lasting
        if not core.lost and not lasting.plan.reconfigure:
            return lasting  # one that moved state is not to do it again
        settled = {
            rank: state
            for rank, state in core.round.settled.items()
            if state.held and state.held_step == version
        }
        return self._planner.after_loss(
            previous, core.lost, version, snapshots=snapshots, settled=settled or None
        )

    def _no_plan(self, why: str) -> str:
        return (
            f"no plan can carry the loss of {listed(sorted(self._core.lost))}: {why}; "
            f"newest complete state: {self._newest_state()}"
        )

    def _newest_state(self) -> str:
        if self._core.base_plan is None:
            return "none, the job had not begun"
        return f"step {len(self._core.records)}, never saved (this version writes no checkpoint)"
