"""How long chunks take on this job's devices, from the times that ranks observe. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from statistics import median

from resihp.ir.program import Program

__all__ = ["ChunkTimes"]

_STEPS = 64
"""How many of the newest are remembered."""


class ChunkTimes:
    """The longest chunk of a usual step: the middle of the longest ones of the newest steps.

    The middle, so that one step that stood still for another reason does not count.
    """

    def __init__(self) -> None:
        self._longest_s: deque[float] = deque(maxlen=_STEPS)
        self._step = -1

    @property
    def longest_s(self) -> float | None:
        """None before the first step."""
        return median(self._longest_s) if self._longest_s else None

    def add(self, program: Program, step: int, starts_ns: bytes, ends_ns: bytes) -> None:
        """The times of one rank in `step`, which fit its program."""
        longest_s = _longest_s(program, array("q", starts_ns), array("q", ends_ns))
        if step == self._step and self._longest_s:
            self._longest_s[-1] = max(self._longest_s[-1], longest_s)
        elif step > self._step:
            self._step = step
            self._longest_s.append(longest_s)


def _longest_s(program: Program, starts_ns: Sequence[int], ends_ns: Sequence[int]) -> float:
    spans = (
        end_ns - start_ns
        for instr, start_ns, end_ns in zip(program.instrs, starts_ns, ends_ns, strict=True)
        if instr.op.is_compute and start_ns
    )
    return max(spans, default=0) * 1e-9
