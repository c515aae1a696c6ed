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
        stages = {stage: _Stage(lane, stage, report) for stage in named if stage is not None}
        if stages:
            _walk(lane, stages)


def _walk(lane: Lane, stages: Mapping[int, _Stage]) -> None:
    for index, instr in enumerate(lane.body):
        stage = lane.placement.stage_of(lane.name.pp, instr)
        if stage is not None and stage in stages:
            stages[stage].see(index, instr.op)
    for state in stages.values():
        state.end()


class _Stage:
    """What a stream has done so far with the parameters of one of its stages."""

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

    def see(self, index: int, op: Op) -> None:
        """The next instruction of the stage."""
        if op.is_compute:
            self._compute(index)
        elif op is Op.GATHER_PARAMS:
            self._gather(index)
        elif op is Op.FREE_PARAMS:
            self._free(index)

    def end(self) -> None:
        """No instruction follows."""
        if self.gathered is not None:
            text = self.lane.text(self.gathered)
            message = f"{text} is never followed by {self._spell_free()}"
            self.report.add("RHP418", self.lane, self.gathered, message)

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
