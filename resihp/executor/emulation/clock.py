"""The time of emulated devices.

What happens on a device has the time at which it is due, not the time at which the host noticed:
a device needs no host to go from one chunk to the next where the queue is full, so wake-ups that
are late do not add up. What the host submits has the host's time, but a host that is late by less
than `FORGIVEN_NS` after something that was due is taken to have run ahead, as it does on a GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import heappop, heappush

from resihp.executor.emulation.alarm import Alarm, LoopAlarm, open_alarm
from resihp.executor.emulation.virtual import VirtualTimeLoop

__all__ = ["FORGIVEN_NS", "Clock"]

FORGIVEN_NS = 1_000_000
"""Of a host in real time; measured wake-ups of an idle machine are 0.1-0.3 ms late."""


_ROUNDED_NS = 1_000
"""By which a virtual loop may be past the time of its timer."""


class Clock:
    """One time line for all devices of this loop: virtual on a `VirtualTimeLoop`, else real.

    Times are nanoseconds: of the loop in virtual time, of `time.monotonic_ns` in real time.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.is_virtual = isinstance(loop, VirtualTimeLoop)
        """Whether nobody waits."""
        self.num_late = 0
        """How often something due was handled more than `FORGIVEN_NS` too late."""
        self.worst_late_ns = 0
        """By how much the host was late at most."""
        self.handled_ns = 0
        """When the host was done with what was due last."""
        self._loop = loop
        self._forgiven_ns = _ROUNDED_NS if self.is_virtual else FORGIVEN_NS
        self._alarm: Alarm = LoopAlarm(self._ring) if self.is_virtual else open_alarm(self._ring)
        self._due: list[tuple[int, int, Callable[[int], None]]] = []
        self._num_set = 0
        self._last_ns = self.host_ns()
        self._is_handling = False

    def host_ns(self) -> int:
        """The time of the host, whatever it still has to handle."""
        return round(self._loop.time() * 1e9) if self.is_virtual else time.monotonic_ns()

    def now_ns(self) -> int:
        """The time of what is handled, or of the host where that is long over."""
        host_ns = self.host_ns()
        return self._last_ns if host_ns - self._last_ns <= self._forgiven_ns else host_ns

    def at(self, time_ns: int, callback: Callable[[int], None]) -> None:
        """Call `callback(time_ns)` then. Those of one time are called in the order of `at`."""
        self._num_set += 1
        is_first = not self._due or time_ns < self._due[0][0]
        heappush(self._due, (time_ns, self._num_set, callback))
        if is_first and not self._is_handling:
            self._alarm.set(time_ns)

    def close(self) -> None:
        """Forget all that is due."""
        self._due.clear()
        self._alarm.close()

    def _ring(self, rung_ns: int) -> None:
        """Handle the earliest time that is due, then let the loop run, then go on."""
        self._is_handling = True
        try:
            if self._due and self._due[0][0] <= max(rung_ns, self.host_ns()):
                self._handle(self._due[0][0])
        finally:
            self._loop.call_soon(self._go_on)

    def _handle(self, time_ns: int) -> None:
        self._last_ns = max(self._last_ns, time_ns)
        late_ns = self.host_ns() - time_ns
        if late_ns > self._forgiven_ns:
            self.num_late += 1
            self.worst_late_ns = max(self.worst_late_ns, late_ns)
        while self._due and self._due[0][0] <= time_ns:
            _, _, callback = heappop(self._due)
            callback(time_ns)
        self.handled_ns = self.host_ns()

    def _go_on(self) -> None:
        """After everything that followed from the last time has run."""
        if self._due and self._due[0][0] <= self.host_ns():
            self._ring(self._due[0][0])
            return
        self._is_handling = False
        if self._due:
            self._alarm.set(self._due[0][0])
