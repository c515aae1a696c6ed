"""Members that died and are started again, where no version of the state is whole without them.

Each of them may have its snapshot still. So where nobody is left, where a shard has no source, or
where no plan is feasible without them, the others wait for those that are being started. Who is
back then belongs to the job again at once, settles with the rest, and holds what its own snapshot
has; one that has none waits like any other rank that is back. Where nobody is left and a version
is saved, they are waited for without snapshots too: they begin again with that. So they are where
nothing is trained yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from resihp.errors import NoFeasiblePlan
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.saving import Saving
from resihp.wire.messages import Close

__all__ = ["Reviving"]


class Reviving:
    """While a generation settles."""

    def __init__(self, core: Core, rejoining: Rejoining, saving: Saving) -> None:
        self._core = core
        self._rejoining = rejoining
        self._saving = saving

    @property
    def is_waiting(self) -> bool:
        """Whether somebody is to come back before the others go on."""
        return self._core.round.awaits and bool(self._members() & self._rejoining.awaited)

    def wait(self, why: str) -> bool:
        """Wait for those that are being started; False where there are none, or they are here."""
        core = self._core
        expected = self._members() & (self._rejoining.awaited | core.returned)
        has_source = core.job.state.snapshot_every != 0 or core.base == 0
        has_source = has_source or (not core.alive and bool(self._saving.versions))
        if not has_source or not expected or core.round.awaits:
            return False
        core.round.awaits = True
        core.log("waits_for_restarts", ranks=sorted(expected), why=why)
        for rank in sorted(expected & core.returned):
            self.back(rank)
        return True

    def back(self, rank: int) -> None:
        """A lost rank can be deployed to; where it is waited for, it belongs to the job again."""
        core = self._core
        if core.phase is not Phase.SETTLING or not core.round.awaits or rank not in self._members():
            return
        core.returned.discard(rank)
        core.lost[:] = [each for each in core.lost if each != rank]
        core.alive.add(rank)
        core.revived.add(rank)
        core.enter(Phase.SETTLING)  # it has as long as the others had
        core.send(rank, Close(generation=core.generation))

    def give_back(self, ranks: Iterable[int]) -> None:
        """They hold nothing that counts: they wait for a place as any rank that is back."""
        core = self._core
        for rank in ranks:
            core.revived.discard(rank)
            core.alive.discard(rank)
            core.round.settled.pop(rank, None)
            core.lost.append(rank)
            core.returned.add(rank)

    def check_left(self) -> None:
        """End the job where nobody is left, and nobody will come back."""
        core = self._core
        if core.phase is Phase.SETTLING and not core.alive and not self.is_waiting:
            core.stop("no rank is left", NoFeasiblePlan.exit_code)

    def _members(self) -> set[int]:
        """Ranks that held a shard, or would have where nothing is trained yet."""
        plans = [plan for plan in self._core.bases.values() if plan is not None]
        if not plans and self._core.plan is not None:
            plans = [self._core.plan]
        return {rank for plan in plans for rank in plan.plan.active_ranks}
