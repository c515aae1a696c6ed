"""How many steps lie between two snapshots where the job file leaves it open.

A snapshot costs memory bandwidth and, on a CPU, time that the next iteration could have used; what
it saves is at most the steps since the one before, and only where all holders of a shard are lost.
So snapshots are taken as often as they cost next to nothing: after every step where a step is long
beside the copy, as in most training, and less often where it is not. Each rank brings to the vote
how far apart its own would have to be, and all take the largest number (`vote`), so that all keep
the same versions.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from resihp.executor.snapshots.format import NUM_SLOTS

__all__ = ["MOST_STEPS", "SHARE", "Cadence", "Cost"]

SHARE = 0.0025
"""Of a step, that snapshots may cost in the mean. What a copy pushes out of the caches costs the
iteration beside it about as much again (`make bench-step`)."""
MOST_STEPS = 50
"""Between two, whatever they cost."""
NUM_SEEN = 5


class Cost(NamedTuple):
    """Of one snapshot or one step; `busy_s` is processor time, `waited_s` that of a clock."""

    busy_s: float
    waited_s: float


class Cadence:
    """What one rank knows of the cost of its snapshots in one layout."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=NUM_SEEN)
        self._num_new = NUM_SLOTS
        """Snapshots still to come into memory not used before, which takes longer."""

    def begin(self) -> None:
        """A layout begins, with memory of its own; its snapshots may have another size."""
        self._shares.clear()
        self._num_new = NUM_SLOTS

    def add(self, snapshot: Cost, step: Cost) -> None:
        """What a snapshot cost in the step beside it."""
        if self._num_new > 0:
            self._num_new -= 1
        elif step.busy_s > 0 and step.waited_s > 0:
            share = max(snapshot.busy_s / step.busy_s, snapshot.waited_s / step.waited_s)
            self._shares.append(share)

    @property
    def gap(self) -> int:
        """Steps from one to the next: the least share seen lately is the one that others, who ran
        meanwhile, disturbed least. 1 before any is known."""
        share = min(self._shares, default=0.0)
        return max(1, math.ceil(min(share / SHARE, MOST_STEPS)))
