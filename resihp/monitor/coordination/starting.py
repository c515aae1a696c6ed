"""Before the first generation: all ranks get ready."""

from __future__ import annotations

from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.planning import Planning
from resihp.wire.messages import Ready

__all__ = ["Starting"]


class Starting:
    """Waits for all ranks, then opens the first generation."""

    def __init__(self, core: Core, planning: Planning) -> None:
        self._core = core
        self._planning = planning

    def ready(self, rank: int, message: Ready) -> None:
        """`rank` can be deployed to."""
        core = self._core
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

    def tick(self, waited_s: float) -> None:
        """End the job where a rank does not get ready."""
        core = self._core
        if waited_s > core.timing.start_s:
            missing = ", ".join(map(str, sorted(core.alive - core.ready.keys())))
            core.stop(f"ranks {missing} did not get ready in {waited_s:.0f} s", 1)
