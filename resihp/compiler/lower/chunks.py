"""The pass `chunks`: tensors are cut and joined between groups of different TP degree.

A scatter stands right before its send. A gather stands right before the use, however early the
receive: until then each member holds its own chunks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from resihp.compiler.lower.steps import bodies_of, replace_bodies, slots
from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.placement import placement_of

__all__ = ["add_chunks"]

_SCATTER = {Op.SEND_ACT: Op.SCATTER_ACT, Op.SEND_GRAD: Op.SCATTER_GRAD}
_GATHER = {Op.RECV_ACT: Op.GATHER_ACT, Op.RECV_GRAD: Op.GATHER_GRAD}
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
"""From the stage of a transfer to the stage at its other end."""


def add_chunks(plan: Plan, *, everywhere: bool) -> Plan:
    """`plan` with scatters and gathers where TP degrees differ.

    If `everywhere`, also between groups of equal degrees above 1 that the tokens divide by.
    """
    degrees = {group.name: group.tp for group in plan.groups}
    if not everywhere and len(set(degrees.values())) == 1:
        return plan
    placement = placement_of(plan)

    def is_cut(name: GroupName, instr: Instr) -> bool:
        stage = placement.stage_of(name.pp, instr)
        assert stage is not None, "the pass before made it of a compute instruction"
        replica = name.replica if instr.peer is None else instr.peer
        there = GroupName(replica, placement.pp[stage + _STAGE_STEP[instr.op]])
        here_tp, there_tp = degrees[name], degrees[there]
        if here_tp != there_tp:
            return True
        return everywhere and here_tp > 1 and plan.batch.tokens % here_tp == 0

    bodies = {
        name: list(_chunked(body, lambda instr, name=name: is_cut(name, instr)))
        for name, body in bodies_of(plan).items()
    }
    return replace_bodies(plan, bodies)


def _chunked(body: Sequence[Instr], is_cut: Callable[[Instr], bool]) -> Iterator[Instr]:
    gathers: dict[tuple[bool, int | None, int | None, int | None], Instr] = {}
    """Of what is received and not used yet, by the instruction that will use it."""
    for instrs in slots(body):
        first = instrs[0]
        if first.op in _SCATTER and is_cut(first):
            yield _instead(first, _SCATTER[first.op])
        elif first.op in _GATHER and is_cut(first):
            user = first.op is Op.RECV_ACT, first.microbatch, first.home, first.stage
            gathers[user] = _instead(first, _GATHER[first.op])
        elif first.op.is_compute:
            for instr in instrs:
                user = instr.op is Op.F, instr.microbatch, instr.home, instr.stage
                if instr.op is not Op.W and user in gathers:
                    yield gathers.pop(user)
        yield from instrs


def _instead(instr: Instr, op: Op) -> Instr:
    """The scatter or gather of a transfer; it names no peer."""
    return msgspec.structs.replace(instr, op=op, peer=None)
