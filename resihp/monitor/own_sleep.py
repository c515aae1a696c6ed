"""Whether this process stood still, by its own clock: stopped, with its machine perhaps, or busy.

What it reads from its sockets then may be old, and whoever was silent meanwhile may not have been.
Pure. A pause that stops the machine's clock too is not seen.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["OwnSleep", "put_off"]


class OwnSleep:
    """Of a process that ticks more often than once in `bound_s`."""

    def __init__(self, bound_s: float, now_s: float) -> None:
        self._bound_s = bound_s
        self._ticked_s = now_s

    def look(self, now_s: float) -> float:
        """How long it stood still until now, told once; 0 where that was no longer than usual."""
        gap_s = now_s - self._ticked_s
        if gap_s <= self._bound_s:
            return 0.0
        self._ticked_s = now_s
        return gap_s

    def tick(self, now_s: float) -> None:
        """It runs."""
        self._ticked_s = now_s


def put_off(all_since_s: Collection[dict[int, float]], by_s: float, now_s: float) -> None:
    """All moments from which on somebody is waited for become `by_s` later, at most now."""
    for since_s in all_since_s:
        for rank in since_s:
            since_s[rank] = min(since_s[rank] + by_s, now_s)
