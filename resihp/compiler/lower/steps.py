"""The streams of a plan as steps that need and make tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, Level, Op, Plan, Stream
from resihp.ir.placement import Placement, placement_of

__all__ = ["Lanes", "Step", "Tensor", "bodies_of", "lanes_of", "replace_bodies", "slots"]


class Tensor(NamedTuple):
    """What a stage makes of one micro-batch for the next stage or, as gradient, the one before."""

    is_grad: bool
    stage: int
    """Which makes it."""
    home: int
    number: int


class Step(NamedTuple):
    """What a stream starts at once: one instruction, or two that are computed overlapped."""

    instrs: tuple[Instr, ...]
    stages: tuple[int | None, ...]
    """Of each instruction; None for STEP."""
    needs: tuple[tuple[Tensor, Instr], ...]
    """Tensors of other stages, each with the instruction that uses it."""
    makes: tuple[tuple[Tensor, Instr], ...]
    """Tensors for other stages, each with the instruction that makes it."""

    @property
    def is_meeting(self) -> bool:
        """Whether it waits for the same step of other groups."""
        return not self.instrs[0].op.is_compute


Lanes = Mapping[GroupName, Sequence[Step]]
"""What each group does, in order."""


def lanes_of(plan: Plan) -> Lanes:
    """The steps of a plan that has no transfers yet.

    Raises UserError where an instruction names no stage of its group.
    """
    placement = placement_of(plan)
    return {
        name: [_step(instrs, name, placement) for instrs in slots(body)]
        for name, body in bodies_of(plan).items()
    }


def bodies_of(plan: Plan) -> dict[GroupName, tuple[Instr, ...]]:
    """The stream of each group, replica by replica."""
    bodies = {
        GroupName(replica, stream.pp): stream.body
        for stream in plan.streams
        for replica in stream.replicas
    }
    return {name: bodies[name] for name in sorted(bodies)}


def replace_bodies(plan: Plan, bodies: Mapping[GroupName, Sequence[Instr]]) -> Plan:
    """`plan` with other streams, one for each group."""
    streams = tuple(
        Stream(replicas=(name.replica,), pp=name.pp, body=tuple(body))
        for name, body in bodies.items()
    )
    return msgspec.structs.replace(plan, streams=streams, level=Level.PLAN)


def slots(body: Sequence[Instr]) -> Iterator[tuple[Instr, ...]]:
    """The instructions of a stream one by one, overlapped ones together."""
    first = 0
    for index, instr in enumerate(body):
        if not instr.paired:
            yield tuple(body[first : index + 1])
            first = index + 1


def _step(instrs: tuple[Instr, ...], name: GroupName, placement: Placement) -> Step:
    stages = tuple(placement.stage_of(name.pp, instr) for instr in instrs)
    needs: list[tuple[Tensor, Instr]] = []
    makes: list[tuple[Tensor, Instr]] = []
    last = placement.num_stages - 1
    for instr, stage in zip(instrs, stages, strict=True):
        op, number = instr.op, instr.microbatch
        if number is None or op is Op.W:
            continue
        if stage is None:
            raise UserError(f"`{op.mnemonic} {number}` in {name} names no stage of its group")
        home = name.replica if instr.home is None else instr.home
        is_grad = op is not Op.F
        before = stage + 1 if is_grad else stage - 1
        if 0 <= before <= last:
            needs.append((Tensor(is_grad, before, home, number), instr))
        if stage != (0 if is_grad else last):
            makes.append((Tensor(is_grad, stage, home, number), instr))
    return Step(instrs, stages, tuple(needs), tuple(makes))
