"""Taking over from another coordinator: what is decided, and whether it still runs.

Training does not need a coordinator between failures. So where every member of the newest
generation runs it, or has joined it, that generation is adopted, and nobody is interrupted.
Otherwise it is closed, and survivors settle as after any loss; so it is where the job is to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.ir.parser import parse
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.running import Running
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.planner import VerifiedPlan
from resihp.monitor.settlement import differing_shards
from resihp.wire.messages import Beat, Go, Joined, Resend, Settled, StepRecord, StoreAt, StoreOpened
from resihp.wire.quorum import Entry

__all__ = ["Resuming"]


class Resuming:
    """From an entry to a generation that runs, or that settles."""

    def __init__(
        self, core: Core, membership: Membership, running: Running, saving: Saving
    ) -> None:
        self._core = core
        self._saving = saving
        self._membership = membership
        self._running = running
        self._runs: dict[int, bool] = {}
        """Whether each rank that was heard runs the generation."""

    def resume(self, entry: Entry, records: Sequence[StepRecord]) -> None:
        """Go on from `entry`. `records`: of the steps that are known to be committed."""
        core = self._core
        core.has_resumed = True
        core.alive = set(entry.alive)
        core.lost = list(entry.lost)
        core.generation = entry.generation
        core.plan = msgspec.structs.replace(
            _verified(entry.plan, entry.steady_plan), waits_for_boundary=entry.waits_for_boundary
        )
        core.base = entry.base
        core.base_plan = _verified(entry.base_plan, entry.base_steady_plan) if entry.base else None
        if core.base_plan is not None:
            core.newcomers = core.alive.intersection(core.base_plan.plan.lost)
        core.begun = entry.generation, entry.commit.version
        if entry.base == 0:
            core.start = entry.commit
        core.perhaps_base = entry.generation, core.plan
        core.records.clear()
        for record in records:
            core.keep_record(record)  # of a run that began with a saved version, not from step 0
        if core.start.version > len(core.records):
            core.keep_record(StepRecord.empty(core.start.version - 1))
        if entry.commit.record is not None:
            core.keep_record(entry.commit.record)
        core.log("resumed", generation=entry.generation, term=entry.term, step=len(core.records))
        core.enter(Phase.RESUMING)
        for rank in range(core.job.parallel.world):
            core.send(rank, Resend(from_step=len(core.records)))

    def settled(self, message: Settled) -> None:
        """A rank has left for a newer generation, whatever an older beat of it says."""
        core = self._core
        if core.phase is Phase.RESUMING and message.generation > core.generation:
            self._close_after(message.generation)

    def beat(self, rank: int, message: Beat) -> None:
        """Whether `rank` runs the generation."""
        if self._core.phase is not Phase.RESUMING:
            return
        self._runs[rank] = message.runs and message.generation == self._core.generation
        if message.generation > self._core.generation:
            self._close_after(message.generation)
        elif self._runs.keys() >= self._core.alive:
            self._decide()

    def joined(self, rank: int, message: Joined) -> None:
        """`rank` has joined the generation, and may be waiting for the others."""
        core = self._core
        if core.phase is Phase.RESUMING and message.generation == core.generation:
            core.round.joined[rank] = message

    def store_opened(self, message: StoreOpened) -> None:
        """Those who still join need it."""
        core = self._core
        if core.phase is Phase.RESUMING and message.generation == core.generation:
            core.broadcast(StoreAt(generation=message.generation, address=message.address))

    def expired(self, waited_s: float) -> None:
        """Some rank was not heard: its generation cannot be judged, so it ends."""
        missing = sorted(self._core.alive - self._runs.keys())
        self._core.log("not_heard", ranks=missing, waited_s=waited_s)
        self._close()

    def _decide(self) -> None:
        core = self._core
        running = {rank for rank in core.alive if self._runs[rank]}
        if running | core.round.joined.keys() < core.alive or self._saving.ending is not None:
            self._close()
        elif not running and differing_shards(core.round.joined):
            self._close()  # whoever opens the next generation finds it again, and says so
        else:
            self._adopt(waiting=core.alive - running)

    def _adopt(self, waiting: set[int]) -> None:
        core = self._core
        assert core.plan is not None
        core.log("adopted", generation=core.generation, waiting=sorted(waiting))
        self._running.expect(core.plan)
        core.settle_on(core.generation, core.plan)
        core.newcomers.clear()
        self._running.begin(is_new=len(waiting) == len(core.alive))
        for rank in sorted(waiting):
            core.send(rank, Go(generation=core.generation))

    def _close_after(self, generation: int) -> None:
        """Ranks were told to leave for `generation`, perhaps to save there: that was another's."""
        self._membership.close(at_least=generation + 1)

    def _close(self) -> None:
        self._core.log("not_adopted", generation=self._core.generation)
        self._membership.close()


def _verified(text: str, steady: str) -> VerifiedPlan:
    """A plan of an entry: it was verified before it was proposed."""
    after = VerifiedPlan(steady, parse(steady).plan) if steady else None
    return VerifiedPlan(text, parse(text).plan, steady=after)
