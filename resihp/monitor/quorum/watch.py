"""Whether a monitor has a leader, and what it does without one. Pure.

It beats with numbers; a leader answers a beat only while it hears a quorum. So what counts is
when the newest answered beat was *sent*: from then on we know, by our own clock alone, that the
leader heard us, and we it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from resihp.wire.quorum import Leads
from resihp.wire.timing import Timing

__all__ = ["Watch"]

MAX_UNANSWERED = 4096


class _Sent(NamedTuple):
    number: int
    at_s: float


class Watch:
    """Of the monitor of one node."""

    def __init__(self, order: int, num_nodes: int, timing: Timing, now_s: float) -> None:
        """`order`: of this node among those of the job; the first one asks first."""
        self._order = order
        self._num_nodes = num_nodes
        self._timing = timing
        self._since_s = now_s
        """Since when nobody has been known to lead."""
        self._was_led = False
        self._has_connection = False
        self._number = 0
        self._sent: deque[_Sent] = deque(maxlen=MAX_UNANSWERED)

    def beats(self, now_s: float) -> int:
        """The number of the beat that is sent now."""
        self._number += 1
        self._sent.append(_Sent(self._number, now_s))
        return self._number

    def heard(self, message: Leads, promised: int) -> None:
        """A leader answers a beat; of another term than the one promised it says nothing."""
        if message.term != promised:
            return
        while self._sent and self._sent[0].number <= message.number:
            sent = self._sent.popleft()
            if sent.number == message.number:
                self._since_s = max(self._since_s, sent.at_s)
                self._was_led = self._has_connection = True

    def lost_connection(self) -> None:
        """The leader's connection is closed: it ended, or the way to it did."""
        self._has_connection = False

    def is_led(self, now_s: float) -> bool:
        """Whether a leader is well: then no other one is promised anything."""
        return self._has_connection and now_s - self._since_s < self._timing.lease_s

    def wants_leader(self, now_s: float) -> bool:
        """Whether to start a coordinator here; nodes do so one after the other."""
        wait_s = self._timing.lease_s * (self._order + self._was_led)
        return not self.is_led(now_s) and now_s - self._since_s >= wait_s

    def must_fence(self, now_s: float) -> bool:
        """Whether other nodes may have gone on without this one. A single node cannot be left."""
        return self._num_nodes > 1 and now_s - self._since_s >= self._timing.fence_s

    def is_alone(self, now_s: float) -> bool:
        """Whether nobody has led for so long that this node ends."""
        return self._num_nodes > 1 and now_s - self._since_s >= self._timing.alone_s
