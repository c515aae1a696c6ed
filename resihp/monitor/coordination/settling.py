"""A closed generation: survivors leave it and settle on one version of the state."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.planning import Planning
from resihp.monitor.coordination.reviving import Reviving
from resihp.monitor.coordination.running import Running
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.incident import listed
from resihp.monitor.planner import VerifiedPlan
from resihp.monitor.settlement import Settlement, newest_version, settle
from resihp.wire.messages import Commit, Settled

__all__ = ["Settling"]


class Settling:
    """Collects what survivors hold, and goes on from the version chosen."""

    def __init__(
        self,
        core: Core,
        membership: Membership,
        reviving: Reviving,
        running: Running,
        planning: Planning,
        saving: Saving,
    ) -> None:
        self._core = core
        self._membership = membership
        self._reviving = reviving
        self._running = running
        self._planning = planning
        self._saving = saving

    def settled(self, rank: int, message: Settled) -> None:
        """`rank` has left, and says what it holds."""
        core = self._core
        if core.phase is Phase.RUNNING and message.generation == core.generation + 1:
            self._membership.yielded()
        if message.generation == core.generation:
            core.round.left.add(rank)
        if core.phase is not Phase.SETTLING or message.generation != core.generation:
            return
        ran = [base for base in core.bases if base]
        holds_some = any(message.layouts) or any(_has(rank, message, base) for base in ran)
        if core.has_resumed and ran and not holds_some:
            core.revived.add(rank)  # it was started again while another coordinator led
        if not core.goes_back and not any(_has(rank, message, base) for base in core.bases):
            if core.base == 0 and core.start.saved:
                # It was not told yet to load what the newest generation was to begin with, so that
                # never ran.
                core.go_back(core.start)
            elif rank not in core.revived:  # else it has nothing, as the settlement will say
                bases = ", ".join(map(str, core.bases))
                self._membership.fence(rank, f"holds layouts {message.layouts}, not {bases}")
                return
        core.round.settled[rank] = message
        self.check()

    def check(self) -> None:
        """Go on once all have settled, and can be deployed to."""
        core = self._core
        if core.phase is not Phase.SETTLING or not core.ready.keys() >= core.alive:
            return
        if self._reviving.is_waiting:
            return
        if not core.alive:
            self._reviving.check_left()
            return
        if core.round.settled.keys() == core.alive and self._find_base():
            self._go_on()

    def _find_base(self) -> bool:
        """Which layout to go on from, where the coordinator before may or may not have said go.

        The older one if all hold it. Whoever was told to go dropped that, but for its snapshots,
        and then all have the newer one, since nobody is told before everybody joined. A layout of
        which a shard has no source is taken only where the other one is no better.

        Ranks that were started again hold nothing, as all do before the first generation: so what
        comes before the newer one is no layout to go on from once that is known to have run.
        """
        core = self._core
        if core.goes_back:
            return True
        states = core.round.settled
        bases = sorted(core.bases)[-1:] if self._has_run() else sorted(core.bases)
        older, newest = bases[0], bases[-1]
        held = [state.layouts for state in states.values() if any(state.layouts)]
        if not held or not all(older in layouts for layouts in held):
            bases.reverse()
        fitting = [base for base in bases if self._fits(base)]
        if not fitting and states.keys() <= core.revived:
            fitting = [newest]
        if fitting:
            whole = [base for base in fitting if self._is_whole(base)]
            if not whole and self._reviving.wait("a shard has no source"):
                return False
            (base, *_) = whole or fitting
            core.settle_on(base, core.bases[base])
            return True
        for rank, state in states.items():
            if not _has(rank, state, newest):
                self._membership.fence(rank, f"holds layouts {state.layouts}, not {newest}")
        return False

    def _without_place(self) -> list[int]:
        """Ranks that were started again and have no place in the base, but in the one before it."""
        core = self._core
        if core.base_plan is None:
            return []
        plan = core.base_plan.plan
        again = core.revived & core.round.settled.keys()
        return sorted(again.difference(plan.active_ranks, plan.standby))

    def _has_run(self) -> bool:
        """Whether a step of the newest generation is known, from reports or from snapshots."""
        newest, version = self._core.begun
        return len(self._core.records) > version or any(
            each.generation == newest and each.version > version
            for state in self._core.round.settled.values()
            for each in state.snapshots
        )

    def _fits(self, base: int) -> bool:
        """Whether all have that layout but those that were started again."""
        core = self._core
        has = {rank for rank, state in core.round.settled.items() if _has(rank, state, base)}
        return bool(has) and core.round.settled.keys() - has <= core.revived

    def _is_whole(self, base: int) -> bool:
        """Whether every shard of that layout has a source."""
        plan = self._core.bases[base]
        return plan is None or self._settlement(base, plan) is not None

    def _settlement(self, base: int, plan: VerifiedPlan) -> Settlement | None:
        core = self._core
        newer, begun = core.begun
        last = begun if newer > base else None
        return settle(base, plan.plan, core.round.settled, core.records, last)

    def _go_on(self) -> None:
        core = self._core
        if core.goes_back:
            self._open(core.start, {})
            return
        self._running.catch_up()
        settlement = self._chosen()
        if settlement is None:
            return
        self._reviving.give_back([*settlement.empty, *self._without_place()])
        self._running.taken_back(settlement.version)
        if settlement.record is not None:
            self._running.committed(settlement.record, core.base)
            self._running.catch_up()
        commit = Commit(
            version=settlement.version, updates=settlement.updates, record=settlement.record
        )
        self._open(commit, settlement.snapshots)

    def _open(self, commit: Commit, snapshots: Mapping[int, tuple[int, ...]]) -> None:
        """Go on from `commit`, or save it where the job is to end."""
        core = self._core
        waits = core.base_plan is not None and core.base_plan.waits_for_boundary
        cause = "the layers that waited for the end of the iteration" if waits else "reopened"
        incident = core.book.open
        if incident is not None:
            incident.settled_s = core.now_s
            incident.noticed_s = max(each.noticed_s for each in core.round.settled.values())
            incident.step = commit.version
            cause = f"lost {listed(incident.ranks)}: {incident.evidence}"
        if self._saving.ending is not None:
            self._saving.begin(commit)
        else:
            self._planning.go_on(cause, commit, snapshots)

    def _chosen(self) -> Settlement | None:
        """What to go on from; where a shard has no source, the newest version without it.

        None: not yet, or nobody is left who holds anything.
        """
        core = self._core
        settled, records = core.round.settled, core.records
        if core.base_plan is not None:
            found = self._settlement(core.base, core.base_plan)
            if found is not None:
                return found
            if settled.keys() <= core.revived and self._planning.goes_back():
                self._open(core.start, {})
                return None
            self._reviving.give_back(sorted(core.revived & settled.keys()))
            if not core.alive:
                self._reviving.check_left()
                return None
        return newest_version(settled.values(), records[-1] if records else None)

    def tick(self, waited_s: float) -> None:
        """Fence who does not leave; end the job where even that helps nobody."""
        core = self._core
        stuck = sorted(core.alive - core.round.settled.keys())
        if waited_s > core.timing.stopped_s and not core.round.is_closed:
            core.round.is_closed = True
            self._membership.tell_to_leave(stuck)  # a vote that broke after others had left
        if not stuck:
            self.check()  # perhaps nobody is waited for any more
        elif waited_s > 2 * core.settle_bound_s:
            core.stop(f"{listed(stuck)} neither settled nor died in {waited_s:.0f} s", 1)
        elif waited_s > core.settle_bound_s:
            for rank in stuck:
                self._membership.fence(rank, f"did not leave its generation in {waited_s:.1f} s")


def _has(rank: int, message: Settled, base: int) -> bool:
    """Whether `rank` holds that layout, or was started again and has a snapshot of it."""
    own = any((each.rank, each.generation) == (rank, base) for each in message.snapshots)
    return own or base in message.layouts
