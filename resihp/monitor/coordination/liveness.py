"""Signs of life and of progress: what takes too long, who is silent, what broke without a death."""

from __future__ import annotations

from resihp.monitor.actions import Evict
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.hanging import Hanging
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.own_sleep import put_off
from resihp.monitor.progress import Progress
from resihp.wire.messages import FATAL, Beat, Fault, NoBuddyCopy, Trouble

__all__ = ["Liveness"]


class Liveness:
    """Of all ranks."""

    def __init__(
        self, core: Core, membership: Membership, hanging: Hanging, progress: Progress
    ) -> None:
        self._core = core
        self._hanging = hanging
        self._membership = membership
        self._progress = progress
        self._evicted_s: dict[int, float] = {}
        self.heard_s: dict[int, float] = {}
        """When each rank's supervisor was last heard."""

    # --- what ranks say

    def heard(self, rank: int) -> None:
        """Anything at all."""
        self.heard_s[rank] = self._core.now_s

    def expect_all(self) -> None:
        """All ranks that are alive are to be heard from now on."""
        for rank in self._core.alive:
            self.heard(rank)

    def beat(self, rank: int, message: Beat) -> None:
        """Liveness and progress."""
        declared = self._progress.beat(rank, message, self._core.now_s)
        if declared is not None:
            reason, at_most_s = declared.reason, declared.at_most_s
            self._core.log("pause", rank=rank, reason=reason, at_most_s=at_most_s)

    def fault(self, rank: int, message: Fault) -> None:
        """What hits `rank`, from whoever brings it about."""
        if message.kind in FATAL:
            self._core.book.hit(rank, message.at_s)
        self._core.log(
            "fault",
            rank=rank,
            fault=message.kind,
            step=message.step,
            instruction=message.instruction,
            hit_s=message.at_s,
        )

    def trouble(self, rank: int, message: Trouble) -> None:
        """Something broke on `rank`: a hint that somebody may be gone."""
        core = self._core
        core.log("trouble", rank=rank, generation=message.generation, what=message.what)
        if message.generation == core.generation and core.round.trouble_since_s is None:
            core.round.trouble_since_s = core.now_s

    def no_copy(self, rank: int, message: NoBuddyCopy) -> None:
        """Were its node lost as well, the state of `rank` would have no copy there."""
        generation, buddy = message.generation, message.buddy
        self._core.log(
            "no_buddy_copy", rank=rank, generation=generation, buddy=buddy, why=message.why
        )

    # --- time passes

    def pauses(self) -> None:
        """What ranks declared as a pause is no standstill, and uses up no deadline."""
        core = self._core
        if self._progress.is_paused(core.alive, core.now_s):
            core.phase_since_s = core.now_s
            self._progress.moved(core.now_s)

    def stood_still(self, slept_s: float) -> None:
        """We did, for `slept_s`: all that we wait for has so much longer, and may have moved."""
        core = self._core
        core.phase_since_s = min(core.phase_since_s + slept_s, core.now_s)
        if core.round.trouble_since_s is not None:
            core.round.trouble_since_s = core.now_s
        put_off((self.heard_s, self._evicted_s), slept_s, core.now_s)
        self._progress.moved(core.now_s)

    def in_trouble(self) -> bool:
        """Whether something broke so long ago that a lost rank would have been found by now."""
        since_s = self._core.round.trouble_since_s
        return since_s is not None and self._core.now_s - since_s > self._core.timing.silent_s

    def tick(self) -> None:
        """Of a generation that opens or runs."""
        if self.in_trouble():
            self._membership.reopen("a connection broke, and nobody was lost")
        elif self._core.phase is Phase.RUNNING:
            self._hanging.tick()

    def check_silence(self) -> None:
        """Evict supervisors that say nothing any more."""
        core = self._core
        for rank in sorted(core.alive | core.returned):
            heard_s = self.heard_s.get(rank)
            if heard_s is None:
                continue
            # Again after a while: the order may not have arrived.
            since_s = max(heard_s, self._evicted_s.get(rank, heard_s))
            if core.now_s - since_s > core.timing.silent_s:
                self._evicted_s[rank] = core.now_s
                core.log("evict", rank=rank, silent_s=core.now_s - heard_s)
                core.do(Evict(rank))
