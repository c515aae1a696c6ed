"""The passes of lowering in their obvious form: in dictionaries, replica by replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from resihp.compiler.lower.cuts import Scatter, is_cut
from resihp.compiler.lower.finish import add_finish
from resihp.compiler.lower.steps import (
    Lanes,
    Step,
    Tensor,
    bodies_of,
    lanes_of,
    replace_bodies,
    slots,
)
from resihp.compiler.lower.transfers import add_transfers_together
from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.placement import placement_of
from resihp.ir.timeline import UNIT_COST


def slow_lower(schedule: Plan, transport: str = "edge", scatter: Scatter | None = None) -> Plan:
    """What `lower` makes of a schedule that is right."""
    plan = add_finish(schedule, UNIT_COST)
    if transport == "edge":
        plan = add_late_transfers(plan)
    else:
        plan = add_transfers_together(plan, UNIT_COST)
    return add_chunks(plan, scatter)


class Crossing(NamedTuple):
    """A tensor that is made in one group and used in another."""

    sender: GroupName
    send: Instr
    receiver: GroupName
    recv: Instr
    use: int
    """Index of the receiver's step that uses it."""


def add_late_transfers(plan: Plan) -> Plan:
    lanes = lanes_of(plan)
    return replace_bodies(plan, _late(lanes, _crossings(lanes)))


def _crossings(lanes: Lanes) -> dict[Tensor, Crossing]:
    """Everything that crosses, sender by sender in the order in which it is made."""
    uses = {
        tensor: (name, index, instr)
        for name, steps in lanes.items()
        for index, step in enumerate(steps)
        for tensor, instr in step.needs
    }
    crossings: dict[Tensor, Crossing] = {}
    for sender, steps in lanes.items():
        for step in steps:
            for tensor, maker in step.makes:
                receiver, use, user = uses.pop(tensor)
                if receiver != sender:
                    send = _end(maker, Op.SEND_GRAD, Op.SEND_ACT, sender, receiver)
                    recv = _end(user, Op.RECV_GRAD, Op.RECV_ACT, receiver, sender)
                    crossings[tensor] = Crossing(sender, send, receiver, recv, use)
    assert not uses
    return crossings


def _end(instr: Instr, grad: Op, act: Op, here: GroupName, there: GroupName) -> Instr:
    """The send or receive that goes with the compute `instr`."""
    return Instr(
        act if instr.op is Op.F else grad,
        instr.microbatch,
        instr.home,
        instr.stage,
        peer=None if there.replica == here.replica else there.replica,
    )


def _late(lanes: Lanes, crossings: Mapping[Tensor, Crossing]) -> dict[GroupName, list[Instr]]:
    channels: dict[tuple[GroupName, GroupName], list[Crossing]] = defaultdict(list)
    for crossing in crossings.values():
        channels[crossing.sender, crossing.receiver].append(crossing)
    recvs: dict[tuple[GroupName, int], list[Instr]] = defaultdict(list)
    """What is received right before each step."""
    for (_, receiver), channel in channels.items():
        place = len(lanes[receiver])
        places: list[int] = []
        for crossing in reversed(channel):
            place = min(place, crossing.use)
            places.append(place)
        for crossing, place in zip(channel, reversed(places), strict=True):
            recvs[receiver, place].append(crossing.recv)
    bodies: dict[GroupName, list[Instr]] = {name: [] for name in lanes}
    for name, body in bodies.items():
        for index, step in enumerate(lanes[name]):
            body += recvs.get((name, index), ())
            body += step.instrs
            body += _sends(step, crossings)
    return bodies


def _sends(step: Step, crossings: Mapping[Tensor, Crossing]) -> list[Instr]:
    return [crossings[tensor].send for tensor, _ in step.makes if tensor in crossings]


_SCATTER = {Op.SEND_ACT: Op.SCATTER_ACT, Op.SEND_GRAD: Op.SCATTER_GRAD}
_GATHER = {Op.RECV_ACT: Op.GATHER_ACT, Op.RECV_GRAD: Op.GATHER_GRAD}
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
"""From the stage of a transfer to the stage at its other end."""


def add_chunks(plan: Plan, scatter: Scatter | None = None) -> Plan:
    """`plan` with scatters and gathers where TP degrees differ and where `scatter` says so."""
    groups = {group.name: group for group in plan.groups}
    if scatter is None and len({group.tp for group in plan.groups}) == 1:
        return plan
    placement = placement_of(plan)

    def cuts(name: GroupName, instr: Instr) -> bool:
        stage = placement.stage_of(name.pp, instr)
        assert stage is not None, "the pass before made it of a compute instruction"
        replica = name.replica if instr.peer is None else instr.peer
        here = groups[name]
        there = groups[GroupName(replica, placement.pp[stage + _STAGE_STEP[instr.op]])]
        if instr.op in _SCATTER:
            return is_cut(plan, here, there, scatter)
        return is_cut(plan, there, here, scatter)

    bodies = {
        name: list(_chunked(body, lambda instr, name=name: cuts(name, instr)))
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
