"""Before the first generation: all ranks get ready.

Who is killed meanwhile is started again, within `[rejoin] restarts`: there is nothing to recover
yet. An executor that ends by itself would do so again, and is something to correct: the job ends.
"""

from __future__ import annotations

from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.planning import Planning
from resihp.monitor.last_words import how_it_ended
from resihp.monitor.own_sleep import put_off
from resihp.monitor.restarts import Restarts
from resihp.wire.messages import ExecutorExited, Ready

__all__ = ["Starting"]


class Starting:
    """Waits for all ranks, then opens the first generation."""

    def __init__(self, core: Core, planning: Planning, restarts: Restarts) -> None:
        """`restarts` are those of all lost ranks: the first step gives its ranks theirs back."""
        self._core = core
        self._planning = planning
        self._restarts = restarts
        self._dead: set[int] = set()
        """Ranks without an executor, whose supervisor is there."""
        self._away: dict[int, str] = {}
        """Ranks whose supervisor is gone, with the evidence."""
        self._away_s: dict[int, float] = {}
        """Since when."""

    def ready(self, rank: int, message: Ready) -> None:
        """`rank` can be deployed to."""
        core = self._core
        self._back(rank)
        core.ready[rank] = message
        digests = {ready.dataset_digest for ready in core.ready.values()}
        if len(digests) > 1:
            core.stop("the ranks read different data: their dataset digests differ", 1)
        elif core.phase is Phase.STARTING and core.ready.keys() == core.alive:
            core.log(
                "ready",
                dataset=message.dataset_digest,
                samples=message.num_samples,
                skipped_files=message.num_skipped_files,
            )
            self._planning.start()

    # --- who is lost meanwhile

    def exited(self, rank: int, message: ExecutorExited) -> None:
        """The executor of `rank` ended; said again, it counts once."""
        if rank in self._dead:
            return
        how = how_it_ended(message)
        if message.code >= 0 or not self._start_again(rank, f"its executor ended with {how}"):
            core = self._core
            core.alive.discard(rank)
            core.stop(f"rank {rank} ended before the start ({how})\n{message.last_words}", 1)

    def disconnected(self, rank: int, evidence: str) -> None:
        """The supervisor of `rank` is gone, and with it its executor; another one may come."""
        core = self._core
        core.ready.pop(rank, None)
        core.book.forget(rank)
        self._dead.discard(rank)
        self._restarts.forget(rank)
        if core.job.rejoin.restarts:
            self._away[rank] = evidence
            self._away_s.setdefault(rank, core.now_s)
            core.log("away_at_start", rank=rank, evidence=evidence)
        else:
            self._give_up(rank, evidence)

    def connected(self, rank: int, *, has_executor: bool) -> None:
        """Its supervisor is there, perhaps again; one without an executor waits to be told."""
        if has_executor:
            self._back(rank)
        elif rank not in self._dead:
            evidence = self._away.get(rank, "its supervisor was started again")
            if not self._start_again(rank, evidence):
                self._give_up(rank, evidence)

    def started(self, rank: int) -> None:
        """There is a new executor of `rank`."""
        self._back(rank)
        self._dead.discard(rank)
        self._restarts.forget(rank)

    def repeat(self, rank: int) -> None:
        """The order to start, where nothing has come of it."""
        if rank in self._dead and rank not in self._restarts.planned:
            self._core.send(rank, self._core.respawn(rank))

    def _start_again(self, rank: int, evidence: str) -> bool:
        core = self._core
        core.ready.pop(rank, None)
        core.book.forget(rank)
        self._back(rank)
        if not self._restarts.plan(rank, core.now_s):
            return False
        self._dead.add(rank)
        core.log("lost_at_start", rank=rank, evidence=evidence)
        core.say(f"! rank {rank} was lost before the start ({evidence}): it is started again")
        self._respawn()
        return True

    def _back(self, rank: int) -> None:
        self._away.pop(rank, None)
        self._away_s.pop(rank, None)

    def _respawn(self) -> None:
        core = self._core
        for rank in self._restarts.due(core.now_s):
            core.enter(Phase.STARTING)  # it has as long as the others had
            core.log("respawn", rank=rank, start=self._restarts.in_vain(rank))
            core.send(rank, core.respawn(rank))

    def _give_up(self, rank: int, evidence: str) -> None:
        self._core.alive.discard(rank)
        self._core.stop(f"rank {rank} was gone before the start: {evidence}", 1)

    # --- time passes

    def tick(self, waited_s: float) -> None:
        """Start who is due; end the job where a rank does not come back, or get ready."""
        core = self._core
        self._respawn()
        for rank, since_s in self._away_s.items():
            if core.now_s - since_s > core.timing.silent_s:
                self._give_up(rank, self._away[rank])
                return
        if waited_s > core.timing.start_s:
            missing = ", ".join(map(str, sorted(core.alive - core.ready.keys())))
            core.stop(f"ranks {missing} did not get ready in {waited_s:.0f} s", 1)

    def stood_still(self, slept_s: float) -> None:
        """This process did, for `slept_s`: whoever is away has so much longer."""
        put_off((self._away_s,), slept_s, self._core.now_s)
