"""Whether a job gets on: where its ranks are, which pauses they declared, when to ask them.

Pure: what ranks said and the time go in, what follows comes out.
"""

from __future__ import annotations

from collections.abc import Collection

from resihp.wire.messages import At, Beat, Pause

__all__ = ["Progress"]


class Progress:
    """Of the ranks of one job."""

    def __init__(self, now_s: float) -> None:
        self.beats: dict[int, Beat] = {}
        """The newest of each rank."""
        self.at: dict[int, At] = {}
        """Where ranks are that answered since nothing moves any more."""
        self._until_s: dict[int, tuple[int, float]] = {}
        """Number of the pause that each rank is in, and when it must be over."""
        self._moved_s = now_s
        self._has_asked = False

    def beat(self, rank: int, beat: Beat, now_s: float) -> Pause | None:
        """A beat of `rank`; the pause that it declares for the first time, if it does."""
        known = self.beats.get(rank)
        self.beats[rank] = beat
        if known is None or (known.step, known.instruction) != (beat.step, beat.instruction):
            self.moved(now_s)
        pause = beat.pause
        if pause is None:
            self._until_s.pop(rank, None)
            return None
        if rank in self._until_s and self._until_s[rank][0] == pause.number:
            return None
        self._until_s[rank] = pause.number, now_s + pause.at_most_s
        return pause

    def moved(self, now_s: float) -> None:
        """Something got on, or had no need to."""
        self._moved_s = now_s

    @property
    def moved_s(self) -> float:
        """When something moved last."""
        return self._moved_s

    def still_s(self, now_s: float) -> float:
        """How long nothing has moved."""
        return now_s - self._moved_s

    def is_paused(self, alive: Collection[int], now_s: float) -> bool:
        """Whether one of `alive` is in a pause that it declared."""
        return any(
            rank in alive and now_s < until_s for rank, (_, until_s) in self._until_s.items()
        )

    def is_time_to_ask(self, after_s: float, now_s: float) -> bool:
        """Whether to ask all ranks where they are: once, when nothing has moved for `after_s`."""
        has_asked, self._has_asked = self._has_asked, self.still_s(now_s) > after_s
        if has_asked or not self._has_asked:
            return False
        self.at.clear()
        return True

    def last_beats(self, alive: Collection[int]) -> str:
        """What the beats of `alive` said last, in words."""
        return ", ".join(
            f"rank {rank} at step {beat.step} instruction {beat.instruction}"
            for rank, beat in sorted(self.beats.items())
            if rank in alive
        )
