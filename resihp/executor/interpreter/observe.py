"""Start and end of every instruction of one iteration, in arrays made beforehand.

An instruction may be several items of a stream (a fused backward, a step): it starts with the
first and ends with the last. A receive starts when it is posted and ends when all of it is here;
a send starts when its tensor is there and ends when it is sent.

Where the device runs behind the host an event has a mark, whose time is known when the device has
come to it: those are kept, and read by `settle` when the iteration is long over.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from resihp.executor.device.issuing import Mark
    from resihp.executor.stream import Event

__all__ = ["Observation"]


class _Later(NamedTuple):
    """A time that is not known yet."""

    instr: int
    is_start: bool
    mark: Mark


class Observation:
    """Times of one iteration by index of instruction, ns of the device's clock; 0: not seen.

    Written from any thread, one writer per instruction at a time.
    """

    __slots__ = ("_later", "ends_ns", "starts_ns", "step")

    def __init__(self, num_instrs: int) -> None:
        self.step = -1
        self.starts_ns = array("q", bytes(8 * num_instrs))
        self.ends_ns = array("q", bytes(8 * num_instrs))
        self._later: list[_Later] = []

    def clear(self, step: int) -> None:
        """Forget everything; `step` is looked at from now on."""
        self.step = step
        empty = bytes(8 * len(self.starts_ns))
        self.starts_ns[:] = array("q", empty)
        self.ends_ns[:] = array("q", empty)
        self._later.clear()

    def began(self, index: int, at_ns: int) -> None:
        """A part of instruction `index` started; the first one counts."""
        known_ns = self.starts_ns[index]
        if not known_ns or at_ns < known_ns:
            self.starts_ns[index] = at_ns

    def ended(self, index: int, at_ns: int) -> None:
        """A part of instruction `index` ended; the last one counts."""
        if at_ns > self.ends_ns[index]:
            self.ends_ns[index] = at_ns

    def began_with(self, index: int, event: Event) -> None:
        """`began`, when `event` happened."""
        if event.mark is None:
            self.began(index, event.at_ns)
        else:
            self._later.append(_Later(index, True, event.mark))

    def ended_with(self, index: int, events: Sequence[Event], not_before_ns: int = 0) -> None:
        """`ended`, when the last of `events` happened, all of which have."""
        ended_ns = not_before_ns
        for event in events:
            if event.mark is None:
                ended_ns = max(ended_ns, event.at_ns)
            else:
                self._later.append(_Later(index, False, event.mark))
        self.ended(index, ended_ns)

    def is_over(self, index: int) -> bool:
        """Whether all of receive `index` is here, on the device too."""
        marks = [each.mark for each in tuple(self._later) if each.instr == index]
        return bool(self.ends_ns[index]) and all(mark.query() for mark in marks)

    def wait(self) -> None:
        """Block this thread until the device has come to all marks."""
        for each in self._later:
            each.mark.synchronize()

    def settle(self) -> None:
        """Read the marks; one that the device has not come to leaves its time unseen."""
        later, self._later = self._later, []
        for index, is_start, mark in later:
            if not mark.query():
                continue
            if is_start:
                self.began(index, mark.at_ns())
            else:
                self.ended(index, mark.at_ns())
