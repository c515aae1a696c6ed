"""Whether observed times are as long as the program that they are said to be of."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from resihp.ir.program import Program
from resihp.wire.messages import Observed

__all__ = ["ObservedSizes", "Verdict"]

NUM_LATE = 2
"""Generations before the present one whose late times still count."""
TIME_BYTES = 8
"""Of one moment in `Observed`."""


class Verdict(enum.Enum):
    """On one message."""

    FITS = enum.auto()
    WRONG = enum.auto()
    """Not as long as the program."""
    LATE = enum.auto()
    """Of a generation that is long over, or of a rank that ran nothing there."""


class ObservedSizes:
    """Lengths of the programs of the newest generations."""

    def __init__(self) -> None:
        self._num_instrs: dict[int, dict[int, int]] = {}

    def begin(self, generation: int, programs: Mapping[int, Program]) -> None:
        """What the ranks run from now on."""
        for old in [each for each in self._num_instrs if each < generation - NUM_LATE]:
            del self._num_instrs[old]
        self._num_instrs[generation] = {
            rank: len(program.instrs) for rank, program in programs.items()
        }

    def judge(self, rank: int, message: Observed) -> Verdict:
        """Of times that `rank` sent."""
        num_instrs = self._num_instrs.get(message.generation, {}).get(rank)
        if num_instrs is None:
            return Verdict.LATE
        sizes = {len(message.starts_ns), len(message.ends_ns)}
        return Verdict.FITS if sizes == {num_instrs * TIME_BYTES} else Verdict.WRONG
