"""Which plan the next generation runs, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.errors import NoFeasiblePlan, PlanRejected
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.deciding import Deciding
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.reviving import Reviving
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.incident import listed
from resihp.monitor.planner import Planner, VerifiedPlan
from resihp.wire.messages import Commit

__all__ = ["Planning"]


class Planning:
    """Makes a plan for those who are alive, and has it decided on."""

    def __init__(
        self,
        core: Core,
        planner: Planner,
        rejoining: Rejoining,
        reviving: Reviving,
        deciding: Deciding,
        saving: Saving,
    ) -> None:
        self._core = core
        self._rejoining = rejoining
        self._reviving = reviving
        self._planner = planner
        self._deciding = deciding
        self._saving = saving

    def start(self) -> None:
        """Open the first generation, from the beginning or from a saved version."""
        self._saving.start()
        if self._core.phase is not Phase.STOPPING:
            self.go_on("start", self._core.start)

    def go_on(
        self, cause: str, commit: Commit, snapshots: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        """Open a generation from `commit`; from a saved version where nothing else is left.

        `snapshots`: of lost ranks, by the live ones that can read them.
        """
        core = self._core
        growth = None if core.goes_back else self._rejoining.admit()
        try:
            if core.goes_back:
                plan = self._loading()
            elif growth is None:
                plan = self._redone(commit.version, snapshots)
            else:
                plan, cause = growth.plan, f"{listed(sorted(growth.ranks))} back: {growth.why}"
        except NoFeasiblePlan as error:
            if self._reviving.wait(str(error)):
                return
            plan = self._gone_back()
            if plan is None:
                self._give_up(str(error), commit)
                return
        except PlanRejected as error:
            core.log("plan_rejected", findings=[d.code for d in error.diagnostics])
            core.stop(str(error), PlanRejected.exit_code)
            return
        if core.generation == 0:
            core.generation = 1
        self._deciding.propose(plan, cause, core.start if core.base == 0 else commit)

    def _redone(
        self, version: int, snapshots: Mapping[int, tuple[int, ...]] | None
    ) -> VerifiedPlan:
        """The plan without the lost; where none is feasible, with those that are back meanwhile.

        They have not proved themselves, which is no reason to end the job.
        """
        try:
            return self._make(version, snapshots)
        except NoFeasiblePlan:
            core = self._core
            if core.base_plan is None:
                raise
            back = core.returned.intersection(core.base_plan.lasting.plan.lost)
            if not back:
                raise
            plan = self._planner.with_returned(
                core.base_plan, core.lost, back, version, snapshots=snapshots
            )
            self._rejoining.take_in(back)
            return plan

    def _make(self, version: int, snapshots: Mapping[int, tuple[int, ...]] | None) -> VerifiedPlan:
        core = self._core
        previous = core.base_plan or self._planner.initial()
        lasting = previous.lasting
        if not core.lost and not lasting.plan.reconfigure:
            return lasting  # one that moved state is not to do it again
        settled = {
            rank: state
            for rank, state in core.round.settled.items()
            if state.held and (state.held_layout, state.held_step) == (core.base, version)
        }
        return self._planner.after_loss(
            previous,
            core.lost,
            version,
            snapshots=snapshots,
            settled=settled or None,
            step_s=core.records[-1].duration_s if core.records else 0.0,
        )

    def _loading(self) -> VerifiedPlan:
        """The plan that begins with the saved version that all begin with."""
        core = self._core
        if all(each.name != core.start.saved for each in self._saving.versions):
            raise NoFeasiblePlan(f"the saved version {core.start.saved} is damaged")
        return self._from_disk(core.start.version)

    def goes_back(self) -> bool:
        """All begin again with the newest saved version, where there is one."""
        return self._gone_back() is not None

    def _gone_back(self) -> VerifiedPlan | None:
        """The plan that begins with the newest saved version that there is, if there is one."""
        for version in self._saving.versions:
            try:
                plan = self._from_disk(version.step)
            except NoFeasiblePlan:
                return None
            self._saving.go_back(version)
            return plan
        return None

    def _from_disk(self, step: int) -> VerifiedPlan:
        core = self._core
        previous = core.base_plan or self._planner.initial()
        if not core.lost:
            return self._planner.loading(previous, step)
        return self._planner.from_checkpoint(previous, core.lost, step)

    def undecided(self, waited_s: float) -> None:
        """No quorum of nodes wrote the plan down in time: the state is saved, and the job ends."""
        reason, commit = self._deciding.undecided(waited_s)
        if self._saving.end(reason, 1):
            self._saving.begin(commit)

    def _give_up(self, why: str, commit: Commit) -> None:
        """Nobody can go on: what is left of the state is saved, and the job ends."""
        lost = listed(sorted(self._core.lost))
        reason = f"no plan can carry the loss of {lost}: {why}" if self._core.lost else why
        if self._saving.end(reason, NoFeasiblePlan.exit_code):
            self._saving.begin(commit)
