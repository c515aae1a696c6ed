"""One alarm at a time on an event loop: by `timerfd` in real time, by the loop in virtual time.

The timers of uvloop are whole milliseconds and those of asyncio are rounded up to them; a
`timerfd` is as exact as the kernel, and costs one wake-up of the loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Alarm", "LoopAlarm", "TimerfdAlarm", "open_alarm"]

_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_NS_PER_S = 1_000_000_000


class Alarm(Protocol):
    """Calls its callback once after each `set`, at that time or soon after."""

    def set(self, time_ns: int) -> None:
        """Ring at `time_ns`; whatever was set before is forgotten."""
        ...

    def close(self) -> None:
        """Never ring again."""
        ...


class LoopAlarm:
    """A timer of the loop; its callback is told the time that was set."""

    def __init__(self, ring: Callable[[int], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, time_ns: int) -> None:
        """Ring at `time_ns` of the loop's time."""
        self.close()
        self._handle = self._loop.call_at(time_ns * 1e-9, self._ring, time_ns)

    def close(self) -> None:
        """Never ring again."""
        if self._handle is not None:
            self._handle.cancel()


class TimerfdAlarm:
    """A `timerfd` of the monotonic clock. Raises OSError where the system has none."""

    def __init__(self, ring: Callable[[int], None]) -> None:
        self._ring = ring
        self._time_ns = 0
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timerfd_create"):
            raise OSError("this system has no timerfd")
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _TimerSpec()
        self._loop.add_reader(self._fd, self._wake)

    def set(self, time_ns: int) -> None:
        """Ring at `time_ns` of `time.monotonic_ns`."""
        self._time_ns = time_ns
        # A time of zero would disarm it.
        self._spec.value_s, self._spec.value_ns = divmod(max(1, time_ns), _NS_PER_S)
        spec = ctypes.byref(self._spec)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _wake(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew after the loop had seen it ring
        self._ring(self._time_ns)

    def close(self) -> None:
        """Never ring again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: no interval, then the time of the alarm."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


def open_alarm(ring: Callable[[int], None]) -> Alarm:
    """The most exact alarm in real time that the system has."""
    try:
        return TimerfdAlarm(ring)
    except OSError:
        return LoopAlarm(ring)  # whole milliseconds: `Clock` reports how late it is
