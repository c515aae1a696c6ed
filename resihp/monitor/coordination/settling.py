"""A closed generation: survivors leave it and settle on one version of the state."""

from __future__ import annotations

from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.planning import Planning
from resihp.monitor.coordination.running import Running
from resihp.monitor.incident import listed
from resihp.monitor.settlement import newest_version
from resihp.wire.messages import Settled

__all__ = ["Settling"]


class Settling:
    """Collects what survivors hold, and goes on from the version chosen."""

    def __init__(
        self, core: Core, membership: Membership, running: Running, planning: Planning
    ) -> None:
        self._core = core
        self._membership = membership
        self._running = running
        self._planning = planning

    def settled(self, rank: int, message: Settled) -> None:
        """`rank` has left, and says what it holds."""
        core = self._core
        if core.phase is not Phase.SETTLING or message.generation != core.generation:
            return
        if core.base not in message.layouts:
            self._membership.fence(rank, f"holds layouts {message.layouts}, not {core.base}")
            return
        core.round.settled[rank] = message
        if core.round.settled.keys() == core.alive:
            self._go_on()

    def _go_on(self) -> None:
        core = self._core
        settlement = newest_version(
            core.round.settled.values(), core.records[-1] if core.records else None
        )
        if settlement.record is not None:
            self._running.committed(settlement.record, core.base)
        cause = "reopened"
        incident = core.book.open
        if incident is not None:
            incident.settled_s = core.now_s
            incident.noticed_s = max(each.noticed_s for each in core.round.settled.values())
            incident.step = settlement.version
            cause = f"lost {listed(incident.ranks)}: {incident.evidence}"
        self._planning.go_on(
            cause, settlement.version, settlement.record, updates=settlement.updates
        )

    def tick(self, waited_s: float) -> None:
        """Fence who does not leave; end the job where even that helps nobody."""
        core = self._core
        stuck = sorted(core.alive - core.round.settled.keys())
        if waited_s > 2 * core.settle_bound_s:
            core.stop(f"{listed(stuck)} neither settled nor died in {waited_s:.0f} s", 1)
        elif waited_s > core.settle_bound_s:
            for rank in stuck:
                self._membership.fence(rank, f"did not leave its generation in {waited_s:.1f} s")
