"""How often a lost rank is started again: a budget that counts progress, not attempts.

A rank that dies again and again before it takes part in a step uses up its budget; a step that it
took part in gives all of it back. Pure: times go in, decisions come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Restarts"]

_MOST_DOUBLINGS = 6


class Restarts:
    """Of the ranks of one job."""

    def __init__(self, most: int, pause_s: float) -> None:
        """`most` starts in vain are allowed; the first is at once, the second `pause_s` after a
        loss, then twice as long each time."""
        self._most = most
        self._pause_s = pause_s
        self._in_vain: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def remember(self, in_vain: Mapping[int, int]) -> None:
        """Starts of ranks since they last took part in a step, under other coordinators."""
        self._in_vain.update(in_vain)

    def in_vain(self, rank: int) -> int:
        """Starts of `rank` since it last took part in a step."""
        return self._in_vain.get(rank, 0)

    def plan(self, rank: int, now_s: float) -> bool:
        """`rank` is lost: start it when `due` says so; whether its budget allows that."""
        used = self.in_vain(rank)
        if used >= self._most:
            return False
        doublings = min(used - 1, _MOST_DOUBLINGS)
        self._due_s[rank] = now_s + (self._pause_s * 2**doublings if used else 0.0)
        return True

    def forget(self, rank: int) -> None:
        """Nobody is there who could start it."""
        self._due_s.pop(rank, None)

    @property
    def planned(self) -> frozenset[int]:
        """Ranks that will be started."""
        return frozenset(self._due_s)

    def due(self, now_s: float) -> list[int]:
        """Ranks to be started now; each is named once and counted as started."""
        ranks = sorted(rank for rank, due_s in self._due_s.items() if due_s <= now_s)
        for rank in ranks:
            self.started(rank)
        return ranks

    def started(self, rank: int) -> bool:
        """`rank` was started, by us or by somebody else; whether its budget allowed that."""
        self._due_s.pop(rank, None)
        self._in_vain[rank] = self.in_vain(rank) + 1
        return self._in_vain[rank] <= self._most

    def took_part(self, ranks: Iterable[int]) -> list[int]:
        """`ranks` completed a step together; those that have their budget back by it."""
        return [rank for rank in ranks if self._in_vain.pop(rank, 0)]
