"""Start and end of every instruction of one iteration, in arrays made beforehand.

An instruction may be several items of a stream (a fused backward, a step): it starts with the
first and ends with the last. A receive starts when it is posted and ends when all of it is here;
a send starts when its tensor is there and ends when it is sent.
"""

from __future__ import annotations

from array import array

__all__ = ["Observation"]


class Observation:
    """Times of one iteration by index of instruction, ns of the device's clock; 0: not seen.

    Written from any thread, one writer per instruction at a time.
    """

    __slots__ = ("ends_ns", "starts_ns", "step")

    def __init__(self, num_instrs: int) -> None:
        self.step = -1
        self.starts_ns = array("q", bytes(8 * num_instrs))
        self.ends_ns = array("q", bytes(8 * num_instrs))

    def clear(self, step: int) -> None:
        """Forget everything; `step` is looked at from now on."""
        self.step = step
        empty = bytes(8 * len(self.starts_ns))
        self.starts_ns[:] = array("q", empty)
        self.ends_ns[:] = array("q", empty)

    def began(self, index: int, at_ns: int) -> None:
        """Instruction `index` started, unless an earlier part of it did."""
        if not self.starts_ns[index]:
            self.starts_ns[index] = at_ns

    def ended(self, index: int, at_ns: int) -> None:
        """The last part of instruction `index` so far ended."""
        self.ends_ns[index] = at_ns
