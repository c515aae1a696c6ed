"""How long everything of one rank's program takes on its emulated device."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.executor.work import Key
from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr

__all__ = ["RankTimes"]

_NS_PER_S = 1e9


class RankTimes:
    """Nanoseconds by operation, stage and micro-batch.

    An overlapped pair takes the time of both, and both results are there at its end; the same for
    B and W of a fused backward. So the first of the two has all of the time, the second none.
    """

    def __init__(self, program: Program, seconds: Sequence[float]) -> None:
        """`seconds` are those of the program's instructions; of a send, until it has arrived."""
        assert len(seconds) == len(program.instrs), "one time per instruction"
        self._ns: dict[tuple[Op, int | None, Key | None], int] = {}
        pair_s = 0.0
        is_second = False
        for index, (instr, mine_s) in enumerate(zip(program.instrs, seconds, strict=True)):
            if instr.paired and not is_second:
                pair_s, is_second = mine_s + seconds[index + 1], True
            elif is_second:
                pair_s, is_second = 0.0, False
            else:
                pair_s = mine_s
            self._add(instr, round(pair_s * _NS_PER_S))

    def _add(self, instr: ProgramInstr, lasts_ns: int) -> None:
        key = None
        if instr.microbatch is not None:
            assert instr.home is not None
            key = instr.home, instr.microbatch
        if instr.op is Op.BW:
            self._ns[Op.B, instr.stage, key] = lasts_ns
            self._ns[Op.W, instr.stage, key] = 0
        else:
            self._ns[instr.op, instr.stage, key] = lasts_ns

    def of(self, op: Op, stage: int | None = None, key: Key | None = None) -> int:
        """Of an operation of the program; B and W of a fused backward too."""
        return self._ns[op, stage, key]
