"""Time as a value that can be replaced: protocol logic runs under a virtual clock in tests."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The system's monotonic clock, which all processes of one machine share."""

    def now_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Where `advance` has brought it."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; going back is a bug of the caller."""
        assert seconds >= 0
        self._now_s += seconds
