"""Keeps a child process alive: started again when it ends, killed when it is stopped or hangs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from resihp.errors import ResihpError
from resihp.monitor.looks import next_look
from resihp.monitor.process import Child, is_stopped
from resihp.monitor.pulse import Pulse, Silence, vitals
from resihp.wire.console import complain
from resihp.wire.timing import Timing

__all__ = ["MAX_QUICK_ENDS", "Keeper", "pause_s"]

QUICK_S = 10.0
"""A process that ends sooner after its start than this ended quickly."""
MAX_QUICK_ENDS = 5
"""How often in a row a process may end so before it is given up."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


def pause_s(num_quick: int) -> float:
    """How long to wait before a process is started again that ended quickly so often in a row."""
    if num_quick == 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_quick - 1, 30))


class Keeper:
    """One process after the other, the next when the last one has ended."""

    def __init__(
        self,
        what: str,
        start: Callable[[], Child],
        timing: Timing,
        *,
        pulse: Pulse | None = None,
    ) -> None:
        """`start` makes the next process. `pulse`: where it counts; it is killed when it hangs,
        and that is a quick end, too."""
        self._what = what
        self._start = start
        self._timing = timing
        self._pulse = pulse
        self._has_hung = False
        """The last process was killed because it hung."""
        self.num_quick = 0
        """How often in a row a process ended quickly."""
        self.child: Child | None = None
        """The process that runs now, or the last one."""

    async def run(
        self, is_over: Callable[[], bool], *, max_quick_ends: int | None = MAX_QUICK_ENDS
    ) -> None:
        """Until a process has ended and `is_over`.

        ResihpError after more than `max_quick_ends` quick ends in a row (None: never).
        """
        while True:
            code = await self.run_one()
            if is_over():
                return
            if max_quick_ends is not None and self.num_quick > max_quick_ends:
                raise ResihpError(
                    f"{self._what} ended {self.num_quick} times within {QUICK_S:.0f} s of its "
                    f"start, or hung, the last time with exit code {code}"
                )
            await self.pause()

    def send(self, number: signal.Signals) -> None:
        """Signal the process that runs now."""
        if self.child is not None:
            self.child.send(number)

    async def run_one(self) -> int:
        """Start one process; its exit code."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        self._has_hung = False
        self.child = self._start()
        watching = [asyncio.create_task(self._kill_when_stopped(self.child))]
        if self._pulse is not None:
            watching.append(asyncio.create_task(self._kill_when_hung(self.child, self._pulse)))
        try:
            code = await self.child.wait()
        finally:
            for task in watching:
                task.cancel()
        is_quick = clock() - began_s < QUICK_S or self._has_hung
        self.num_quick = self.num_quick + 1 if is_quick else 0
        return code

    async def pause(self) -> None:
        """Wait before the next process, the longer the more often one ended quickly."""
        await asyncio.sleep(pause_s(self.num_quick))

    async def _kill_when_stopped(self, child: Child) -> None:
        """A process that the kernel shows as stopped serves nobody, and another one would."""
        stopped_since_s: float | None = None
        clock = asyncio.get_running_loop().time
        while True:
            await next_look(self._timing.beat_s)
            if not is_stopped(child.pid):
                stopped_since_s = None
            elif stopped_since_s is None:
                stopped_since_s = clock()
            elif clock() - stopped_since_s >= self._timing.stopped_s:
                child.send(signal.SIGKILL)

    async def _kill_when_hung(self, child: Child, pulse: Pulse) -> None:
        """So does one whose loop stands still."""
        clock = asyncio.get_running_loop().time
        silence = Silence(self._timing, clock(), vitals(child.pid, pulse))
        while True:
            await next_look(self._timing.beat_s)
            if not child.running:
                return
            why = silence.look(clock(), vitals(child.pid, pulse))
            if why:
                complain(f"resihp: {self._what} {why}: killed")
                self._has_hung = True
                child.send(signal.SIGKILL)
                return
