"""Orders that may not have arrived: ranks whose monitor is new, or is back, get them again.

All of them do nothing where they arrive for the second time, but an operator's wish: at worst that
is done twice.
"""

from __future__ import annotations

from collections.abc import Collection

from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.opening import Opening
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.coordination.starting import Starting
from resihp.monitor.coordination.wishing import Wishing
from resihp.wire.messages import Close, Go, Resend

__all__ = ["Repeating"]


class Repeating:
    """Of what the present phase asks of ranks."""

    def __init__(
        self,
        core: Core,
        starting: Starting,
        opening: Opening,
        saving: Saving,
        rejoining: Rejoining,
        wishing: Wishing,
    ) -> None:
        self._core = core
        self._starting = starting
        self._wishing = wishing
        self._rejoining = rejoining
        self._opening = opening
        self._saving = saving

    def reached(self, ranks: Collection[int]) -> None:
        """Messages reach `ranks` again, and what they said meanwhile may be lost too."""
        core = self._core
        if core.phase is Phase.STOPPING:
            return
        for rank in ranks:
            core.send(rank, Resend(from_step=len(core.records)))
            if rank in core.round.fenced:
                core.send(rank, core.fence(rank, core.round.fenced[rank]))
            self._rejoining.repeat(rank)
        for rank in sorted(core.alive & set(ranks)):
            match core.phase:
                case Phase.STARTING:
                    self._starting.repeat(rank)
                case Phase.SETTLING if rank not in core.round.settled:
                    core.send(rank, Close(generation=core.generation))
                case Phase.OPENING:
                    self._opening.repeat(rank)
                case Phase.SAVING:
                    self._saving.repeat(rank)
                case Phase.RUNNING:
                    core.send(rank, Go(generation=core.generation))
                    if rank == core.round.asked_to_yield:
                        core.ask_to_yield()
                    self._wishing.repeat(rank)
                case _:
                    pass
