"""Parameters that data parallelism shards are gathered before use and given back after it."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName, Op
from resihp.ir.verify.report import Report

__all__ = ["check_params"]


def check_params(lanes: Mapping[GroupName, Lane], report: Report) -> None:
    """RHP417 and RHP418, for the stages that a stream gathers or frees at all."""
    for lane in lanes.values():
        named = {
            lane.placement.stage_of(lane.name.pp, instr)
            for instr in lane.body
            if instr.op is Op.GATHER_PARAMS or instr.op is Op.FREE_PARAMS
        }
        for stage in lane.stages:
            if stage in named:
                _Stage(lane, stage, report).check()


class _Stage:
    """One walk over a stream for one of its stages."""

    def __init__(self, lane: Lane, stage: int, report: Report) -> None:
        self.lane = lane
        self.stage = stage
        self.report = report
        self.gathered: int | None = None
        """The gather whose free is still to come."""
        self.freed: int | None = None
        """The last free."""
        self.bare: int | None = None
        """The first compute since then, where nothing is gathered."""

    def check(self) -> None:
        lane = self.lane
        for index, instr in enumerate(lane.body):
            op = instr.op
            if lane.placement.stage_of(lane.name.pp, instr) != self.stage:
                continue
            if op.is_compute:
                self._compute(index)
            elif op is Op.GATHER_PARAMS:
                self._gather(index)
            elif op is Op.FREE_PARAMS:
                self._free(index)
        if self.gathered is not None:
            message = f"{lane.text(self.gathered)} is never followed by {self._spell_free()}"
            self.report.add("RHP418", lane, self.gathered, message)

    def _spell_free(self) -> str:
        bracket = f"[{self.stage}]" if len(self.lane.stages) > 1 else ""
        return f"`{Op.FREE_PARAMS.mnemonic}{bracket}`"

    def _compute(self, index: int) -> None:
        if self.gathered is not None or self.bare is not None:
            return
        self.bare = index
        lane, freed = self.lane, self.freed
        related = () if freed is None else (self.report.here(lane, freed, of=False),)
        message = f"{lane.text(index)} runs while the parameters of its stage are not gathered"
        self.report.add("RHP417", lane, index, message, related)

    def _gather(self, index: int) -> None:
        if self.gathered is not None:
            text, before = self.lane.text(index), self.lane.text(self.gathered)
            message = f"{text} follows {before} with no {self._spell_free()} between them"
            related = (self.report.here(self.lane, self.gathered, of=False),)
            self.report.add("RHP418", self.lane, index, message, related)
        self.gathered, self.bare = index, None

    def _free(self, index: int) -> None:
        if self.gathered is None and self.bare is None:  # after a compute RHP417 has it
            message = f"{self.lane.text(index)} frees what is not gathered"
            freed = self.freed
            related = () if freed is None else (self.report.here(self.lane, freed, of=False),)
            self.report.add("RHP418", self.lane, index, message, related)
        self.gathered, self.freed, self.bare = None, index, None
