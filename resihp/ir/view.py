"""A plan as lint and diff look at it: every instruction of every lane with stage and tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Span
from resihp.ir.lanes import EDGES, Lane, MicroBatch, alike, lanes_of, name_of
from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.placement import Placement, placement_of
from resihp.ir.source import Parsed

__all__ = ["Item", "Key", "View", "view_of"]


class Key(NamedTuple):
    """An instruction by what it is about."""

    op: Op
    stage: int
    micro_batch: MicroBatch


class Item(NamedTuple):
    """An instruction about a micro-batch, with its number in its stream."""

    position: int
    key: Key
    instr: Instr


class View(NamedTuple):
    """The lanes of a plan; what the plan gets wrong is left out."""

    parsed: Parsed
    placement: Placement
    alike: Mapping[int, tuple[int, ...]]
    """Replicas that each replica with lanes stands for."""
    lanes: Mapping[GroupName, Lane]

    @property
    def plan(self) -> Plan:
        """What is looked at."""
        return self.parsed.plan

    def items(self, lane: Lane) -> Iterator[Item]:
        """The instructions of `lane` that are about a micro-batch, in order."""
        for index, (instr, task) in enumerate(zip(lane.body, lane.tasks, strict=True)):
            if task is not None:
                yield Item(index, Key(instr.op, task.stage, task.micro_batch), instr)

    def span(self, lane: Lane, index: int) -> Span:
        """Place of an instruction."""
        return self.parsed.streams[lane.stream].span(index)

    def line(self, lane: Lane, index: int) -> int:
        """Line of an instruction."""
        return self.span(lane, index).line

    def far_end(self, lane: Lane, item: Item) -> GroupName | None:
        """The group at the other end of a send or receive; None past the ends of the model."""
        edge = next(edge for edge in EDGES if item.instr.op in (edge.send, edge.recv))
        step = edge.stage_step if item.instr.op is edge.send else -edge.stage_step
        stage = item.key.stage + step
        if not 0 <= stage < self.placement.num_stages:
            return None
        replica = lane.name.replica if item.instr.peer is None else item.instr.peer
        return GroupName(replica, self.placement.pp[stage])

    def text(self, lane: Lane, item: Item) -> str:
        """The instruction as it reads in its stream, without its peer."""
        several = len(self.placement.stages[lane.name.pp]) > 1
        stage = f"[{item.key.stage}]" if several else ""
        number = name_of(item.key.micro_batch, lane.name.replica)
        return f"`{item.instr.op.mnemonic}{stage} {number}`"


def view_of(parsed: Parsed, *, every_replica: bool = False) -> View:
    """The lanes of a plan: one for all replicas that do the same, or those of `every_replica`."""
    plan = parsed.plan
    groups = {replica: (replica,) for replica in _replicas(plan)} if every_replica else alike(plan)
    return View(parsed, placement_of(plan), groups, lanes_of(plan, groups))


def _replicas(plan: Plan) -> Iterator[int]:
    return iter(dict.fromkeys(group.replica for group in plan.groups))
