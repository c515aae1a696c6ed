"""Whether observed times are as long as the program that they are said to be of."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.monitor.planner import VerifiedPlan
from resihp.wire.messages import Observed

__all__ = ["ObservedSizes", "Programs", "Verdict"]

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


class Programs(NamedTuple):
    """What the ranks of a generation run."""

    redone: int
    """The iteration that `first` is for; -1: all."""
    first: Mapping[int, Program]
    steady: Mapping[int, Program]

    def of(self, step: int) -> Mapping[int, Program]:
        """By rank, in iteration `step`."""
        return self.first if step == self.redone else self.steady

    @classmethod
    def of_plan(cls, plan: VerifiedPlan) -> Programs:
        """Those of a plan and of what follows it."""
        first, resume = _expanded(plan.plan), plan.plan.resume
        if plan.steady is None or resume is None:
            return cls(-1, first, first)
        return cls(resume.step, first, _expanded(plan.steady.plan))


def _expanded(plan: Plan) -> Mapping[int, Program]:
    return {rank: expand(plan, rank) for rank in plan.active_ranks}


class _Lengths(NamedTuple):
    """Instructions by rank, as `Programs` has them."""

    redone: int
    first: Mapping[int, int]
    steady: Mapping[int, int]


class ObservedSizes:
    """Lengths of the programs of the newest generations."""

    def __init__(self) -> None:
        self._num_instrs: dict[int, _Lengths] = {}

    def begin(self, generation: int, programs: Programs) -> None:
        """What the ranks run from now on."""
        for old in [each for each in self._num_instrs if each < generation - NUM_LATE]:
            del self._num_instrs[old]
        first, steady = (
            {rank: len(program.instrs) for rank, program in of.items()}
            for of in (programs.first, programs.steady)
        )
        self._num_instrs[generation] = _Lengths(programs.redone, first, steady)

    def judge(self, rank: int, message: Observed) -> Verdict:
        """Of times that `rank` sent."""
        known = self._num_instrs.get(message.generation)
        if known is None:
            return Verdict.LATE
        num_instrs = (known.first if message.step == known.redone else known.steady).get(rank)
        if num_instrs is None:
            return Verdict.LATE
        sizes = {len(message.starts_ns), len(message.ends_ns)}
        return Verdict.FITS if sizes == {num_instrs * TIME_BYTES} else Verdict.WRONG
