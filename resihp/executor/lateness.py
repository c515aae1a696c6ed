"""How late beats are: whether the event loop gets its turn while the rank computes."""

from __future__ import annotations

from array import array

__all__ = ["Lateness"]

_KEPT = 1 << 16


class Lateness:
    """The newest delays, in seconds; a few hours of beats."""

    def __init__(self) -> None:
        self._late_s = array("d")
        self._num_seen = 0

    def add(self, late_s: float) -> None:
        """One beat was late by so much."""
        if self._num_seen < _KEPT:
            self._late_s.append(late_s)
        else:
            self._late_s[self._num_seen % _KEPT] = late_s
        self._num_seen += 1

    def quantile_s(self, share: float) -> float:
        """No more than this `share` of the kept beats was later; 0 without beats."""
        if not self._late_s:
            return 0.0
        ordered = sorted(self._late_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def __str__(self) -> str:
        median, most, worst = (self.quantile_s(share) * 1e3 for share in (0.5, 0.99, 1.0))
        return (
            f"{self._num_seen} beats while computing, late by {median:.2f} ms in the median, "
            f"{most:.2f} ms at p99, {worst:.2f} ms at most"
        )
