"""Which ranks of a node are there. Pure: what happened and the time go in, what follows comes out.

awaited --connected--> here --connection lost--> gone --connected--> here
   |                     |
   +--- too late ---> gone <--- silent or stopped for too long
"""

from __future__ import annotations

from collections.abc import Iterable

from resihp.monitor.own_sleep import OwnSleep, put_off
from resihp.wire.messages import Beat
from resihp.wire.timing import Timing

__all__ = ["Roster"]


class Roster:
    """The supervisors of one node, as its monitor sees them."""

    def __init__(
        self, ranks: Iterable[int], timing: Timing, now_s: float, *, was_restarted: bool
    ) -> None:
        """`was_restarted`: supervisors knew an earlier monitor and must come back soon."""
        self._timing = timing
        self._sleep = OwnSleep(timing.lease_s, now_s)
        self._awaited_until_s = now_s + timing.silent_s if was_restarted else None
        self._awaited = set(ranks)
        self._heard_s: dict[int, float] = {}
        self._stopped_since_s: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
        self.gone: dict[int, str] = {}
        """Why each rank that is gone is so."""

    @property
    def here(self) -> frozenset[int]:
        """Ranks whose supervisor is connected."""
        return frozenset(self._heard_s)

    def connected(self, rank: int, now_s: float) -> None:
        """The supervisor of `rank` is there, perhaps again."""
        self._awaited.discard(rank)
        self.gone.pop(rank, None)
        self._heard_s[rank] = now_s

    def heard(self, rank: int, now_s: float, beat: Beat | None = None) -> None:
        """A message of `rank`, with its newest beat if it is one."""
        self._heard_s[rank] = now_s
        if beat is not None:
            self._beats[rank] = beat

    def disconnected(self, rank: int, evidence: str) -> None:
        """The connection of `rank` is closed."""
        del self._heard_s[rank]
        self._stopped_since_s.pop(rank, None)
        self._beats.pop(rank, None)
        self.gone[rank] = evidence

    def tick(self, now_s: float) -> None:
        """Once per beat, before ranks are judged: where we stood still, nobody was silent."""
        slept_s = self._sleep.look(now_s)
        self._sleep.tick(now_s)
        if not slept_s:
            return
        put_off((self._heard_s, self._stopped_since_s), slept_s, now_s)
        if self._awaited_until_s is not None:
            self._awaited_until_s += slept_s

    def take_beats(self) -> dict[int, Beat]:
        """The newest beat of each rank since the last call."""
        beats, self._beats = self._beats, {}
        return beats

    def missed(self, now_s: float) -> list[int]:
        """Ranks that did not come back in time; they are gone from now on."""
        if self._awaited_until_s is None or now_s < self._awaited_until_s:
            return []
        missed = sorted(self._awaited)
        self._awaited.clear()
        for rank in missed:
            self.gone[rank] = "its supervisor did not come back"
        return missed

    def to_kill(self, stopped: Iterable[int], now_s: float) -> dict[int, str]:
        """Supervisors to SIGKILL, with the reason; `stopped` are those the kernel shows so."""
        stopped = set(stopped)
        for rank in self._stopped_since_s.keys() - stopped:
            del self._stopped_since_s[rank]
        for rank in stopped & self.here:
            self._stopped_since_s.setdefault(rank, now_s)
        reasons = {
            rank: f"its supervisor was stopped for {now_s - since_s:.1f} s"
            for rank, since_s in self._stopped_since_s.items()
            if now_s - since_s >= self._timing.stopped_s
        }
        for rank, heard_s in self._heard_s.items():
            if now_s - heard_s > self._timing.silent_s:
                reasons.setdefault(rank, f"its supervisor was silent for {now_s - heard_s:.1f} s")
        return reasons
