"""Who belongs to the job: losses, fencing, and the end of a generation that follows."""

from __future__ import annotations

from collections.abc import Iterable

from resihp.monitor.coordination.core import Core, Round
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.reviving import Reviving
from resihp.monitor.last_words import how_it_ended, own_line
from resihp.wire.messages import Beat, Close, ExecutorExited

__all__ = ["Membership"]

MAX_REOPENINGS = 3
"""How often in a row a generation may fail to open without any rank being lost."""


class Membership:
    """Loses ranks and closes generations."""

    def __init__(self, core: Core, rejoining: Rejoining, reviving: Reviving) -> None:
        self._core = core
        self._reviving = reviving
        self._rejoining = rejoining
        self._reopenings = 0

    def exited(self, rank: int, message: ExecutorExited) -> None:
        """The executor of `rank` ended."""
        core = self._core
        reason = core.round.fenced.get(rank) or message.fenced
        how = how_it_ended(message)
        evidence = f"fenced: {reason}" if reason else f"its executor ended with {how}"
        core.book.ended(rank, message.hit_s, message.seen_s)
        self.lose(rank, evidence, message.last_words)
        if core.phase is not Phase.STOPPING:
            self._rejoining.lost(rank)
            self._nobody_left()

    def disconnected(self, rank: int, evidence: str) -> None:
        """The supervisor of `rank` is gone, and with it its executor."""
        self._rejoining.gone(rank)
        self.lose(rank, evidence, "")
        self._nobody_left()

    def lose(self, rank: int, evidence: str, last_words: str) -> None:
        """`rank` is dead: the others leave the generation, unless they run without it."""
        core = self._core
        stands_by = self._stands_by(rank)
        core.alive.discard(rank)
        core.newcomers.discard(rank)
        core.lost.append(rank)
        self._rejoining.distrust()
        self._reopenings = 0
        if rank in core.told_lost:
            core.told_lost.discard(rank)
            core.book.forget(rank)
        else:
            self._tell_loss(rank, evidence, last_words, stands_by)
        if not stands_by:
            self.close()

    def _tell_loss(self, rank: int, evidence: str, last_words: str, stands_by: bool) -> None:
        core = self._core
        core.log(
            "rank_lost",
            rank=rank,
            evidence=evidence,
            last_words=last_words,
            standby=stands_by,
            hit_s=core.book.hit_s(rank),
        )
        if line := own_line(last_words):
            core.say(f"rank {rank}: {line}")
        if stands_by:
            core.book.forget(rank)
            core.say(f"! lost standby rank {rank} ({evidence}): no other rank stops for it")
            return
        core.book.lose(
            rank,
            evidence,
            now_s=core.now_s,
            step=len(core.records),
            since_s=core.last_step_s if core.phase is Phase.RUNNING else core.now_s,
        )

    def _stands_by(self, rank: int) -> bool:
        """Whether a generation runs in which `rank` has no place.

        While one opens it may still give its shards away.
        """
        core = self._core
        if core.phase is not Phase.RUNNING or core.plan is None:
            return False
        return rank not in core.plan.plan.active_ranks

    def _nobody_left(self) -> None:
        if not self._core.alive:
            self._reviving.wait("no rank is left")
            self._reviving.check_left()

    def close(self, *, at_least: int = 0) -> None:
        """Everybody leaves the running generation, for the next or for `at_least`.

        Another coordinator that led before may have told ranks of the next one, and had them save
        there: whoever takes over leaves it out.
        """
        core = self._core
        next_one = core.generation + (2 if core.phase is Phase.RESUMING else 1)
        told = set(core.alive)
        self._rejoining.interrupted()
        core.generation = max(next_one, at_least)
        core.round = Round(is_closed=True)
        core.enter(Phase.SETTLING)
        self.tell_to_leave(told)

    def yielded(self) -> None:
        """The members leave the running generation as they agreed; standby ranks are told."""
        core = self._core
        assert core.plan is not None
        self._rejoining.left()
        core.generation += 1
        core.round = Round()
        core.enter(Phase.SETTLING)
        self.tell_to_leave(core.alive.difference(core.plan.plan.active_ranks))

    def tell_to_leave(self, ranks: Iterable[int]) -> None:
        """Their generation is over, whatever they do."""
        for rank in sorted(ranks):
            self._core.send(rank, Close(generation=self._core.generation))

    def reopen(self, reason: str) -> None:
        """Nobody was lost and yet the generation cannot go on; a few times in a row, no more."""
        self._reopenings += 1
        self._core.log("reopen", reason=reason, attempt=self._reopenings)
        if self._reopenings > MAX_REOPENINGS:
            self._core.stop(f"{reason}, {self._reopenings} times in a row", 1)
        else:
            self.close()

    def progressed(self) -> None:
        """A step was committed: what went wrong before does not count any more."""
        self._reopenings = 0

    def expel(self, rank: int, message: Beat) -> None:
        """A rank that was taken for lost, with its node perhaps, works on: it has no place."""
        core = self._core
        if self._rejoining.is_dead(rank):
            return  # what a dead executor said last
        is_back = rank in core.returned
        if message.runs or (message.generation and not is_back):
            core.returned.discard(rank)
            self.fence(rank, "its generation is over")

    def fence(self, rank: int, reason: str) -> None:
        """Have the executor of `rank` killed; it is lost once its supervisor reports it dead."""
        core = self._core
        if rank not in core.round.fenced:
            core.round.fenced[rank] = reason
            core.log("fence", rank=rank, reason=reason)
            core.send(rank, core.fence(rank, reason))
