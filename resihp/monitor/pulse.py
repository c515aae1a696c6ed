"""Whether the event loop of a child process still turns: it counts in memory that we share.

A loop may be silent because it computes (a plan of a large job takes its time) or because it hangs;
the kernel tells the two apart, by the processor time that the process uses.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from resihp.monitor.looks import next_look
from resihp.monitor.process import stat_of
from resihp.wire.timing import Timing

__all__ = ["Pulse", "Silence", "Vitals", "vitals"]

_COUNT_BYTES = 8


class Pulse:
    """A counter in an anonymous file that is inherited."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("resihp-pulse", 0) if fd is None else fd

    @property
    def count(self) -> int:
        """How often the loop turned since the file was made."""
        return int.from_bytes(os.pread(self.fd, _COUNT_BYTES, 0), "big")

    async def keep(self, period_s: float) -> None:
        """Count once per period, on the loop that is to be heard of, until cancelled."""
        while True:
            os.pwrite(self.fd, (self.count + 1).to_bytes(_COUNT_BYTES, "big"), 0)
            await next_look(period_s)


class Vitals(NamedTuple):
    """What is seen of a process from outside."""

    beat: int
    """Of its pulse."""
    cpu_ticks: int
    """Processor time that it used, in ticks of the kernel."""
    wants_cpu: bool
    """It runs, or waits for a processor."""


def vitals(pid: int, pulse: Pulse) -> Vitals:
    """Of a child that was not reaped yet."""
    stat = stat_of(pid)
    return Vitals(pulse.count, stat.cpu_ticks, stat.state == "R")


class Silence:
    """How long a process has not been heard, and how much of that it did nothing. Pure.

    Time counts as it passes here: where both of us were stopped, nobody was silent.
    """

    def __init__(self, timing: Timing, now_s: float, first: Vitals) -> None:
        self._timing = timing
        self._seen_s = now_s
        self._last = first
        self._was_heard = False
        self._silent_s = 0.0
        self._idle_s = 0.0

    def look(self, now_s: float, seen: Vitals) -> str:
        """Once per beat: why the process is to be killed; empty: it is not."""
        timing, last = self._timing, self._last
        passed_s = min(now_s - self._seen_s, 2 * timing.beat_s)
        self._seen_s, self._last = now_s, seen
        if seen.beat != last.beat:
            self._was_heard = True
            self._silent_s = self._idle_s = 0.0
            return ""
        self._silent_s += passed_s
        if not seen.wants_cpu and seen.cpu_ticks == last.cpu_ticks:
            self._idle_s += passed_s
        idle_bound_s = timing.unheard_s if self._was_heard else timing.start_s
        if self._idle_s >= idle_bound_s:
            return f"hung for {self._silent_s:.1f} s"
        if self._silent_s >= max(timing.stalled_s, idle_bound_s):
            return f"computed for {self._silent_s:.1f} s without an end"
        return ""
