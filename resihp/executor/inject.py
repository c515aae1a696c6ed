"""Faults of the job file that hit this rank, for real: the process kills itself with SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

from resihp.config import Injection
from resihp.executor.stream import Event
from resihp.wire.messages import Fault, Message

__all__ = ["Injector", "announcer"]

_Announce = Callable[[str, int, int, Event], None]


def announcer(send: Callable[[Message], None]) -> _Announce:
    """Announces faults by `send`, on the running loop and from any thread."""
    loop = asyncio.get_running_loop()

    def announce(kind: str, step: int, index: int, sent: Event) -> None:
        def tell() -> None:
            send(Fault(kind=kind, step=step, instruction=index, at_s=time.monotonic()))
            sent.set()

        loop.call_soon_threadsafe(tell)

    return announce


class Injector:
    """Arms the injections of one rank.

    `announce(kind, step, index, sent)` must send the announcement and then set `sent`; the fault
    waits for that, so that its moment is known to the coordinator. It holds up the thread that it
    runs on until then, unless that is the one that announces (`is_on_loop`).
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        rank: int,
        announce: _Announce,
        *,
        is_on_loop: bool = False,
    ) -> None:
        self._armed = [injection for injection in injections if injection.rank == rank]
        self._announce = announce
        self._is_on_loop = is_on_loop
        self.num_instrs = 0
        """Length of the rank's program; the default place of a fault is its middle."""

    def before(self, step: int, index: int) -> Callable[[], None] | None:
        """The fault to run right before instruction `index` of iteration `step`."""
        for injection in self._armed:
            if injection.step == step and self._place(injection) == index:
                return lambda: self._kill(injection, index)
        return None

    def _place(self, injection: Injection) -> int:
        place = injection.instruction
        return self.num_instrs // 2 if place is None else min(place, self.num_instrs - 1)

    def _kill(self, injection: Injection, index: int) -> None:
        sent = Event()
        self._announce(injection.kind, injection.step, index, sent)
        sent.when_done(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        if not self._is_on_loop:
            sent.wait()
