"""The pass `transfers`: what crosses between groups is sent and received.

A send stands right after what makes the tensor, and never waits. What a group hands over to
itself needs no transfer. Receives are placed in one of two ways:

`late`
    Right before the use, so that buffers live as short as they can. Only where a channel brings
    a message that is used earlier after it does a receive move forward, to before that use:
    both ends of a channel list its messages in the same order.
`together`
    The schedule is played, and when something ends that another group needs, the send is added
    to the one stream and the receive to the other at that moment. All streams follow one order
    of all transfers, and in that order the first thing that is not done can always go on: such a
    plan ends under every transport, with one queue per rank or without any buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from resihp.compiler.lower.play import play
from resihp.compiler.lower.steps import Lanes, Step, Tensor, lanes_of, replace_bodies
from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, Op, Plan

__all__ = ["add_transfers"]

_Bodies = dict[GroupName, list[Instr]]


class _Crossing(NamedTuple):
    """A tensor that is made in one group and used in another."""

    sender: GroupName
    send: Instr
    receiver: GroupName
    recv: Instr
    use: int
    """Index of the receiver's step that uses it."""


def add_transfers(plan: Plan, cost: Mapping[Op, float], *, together: bool) -> Plan:
    """`plan` with the transfers that its streams need, received `together` or late.

    Raises UserError for a tensor without maker or user and, if `together`, for streams that wait
    for each other.
    """
    lanes = lanes_of(plan)
    crossings = _crossings(lanes)
    bodies = _together(lanes, crossings, cost) if together else _late(lanes, crossings)
    return replace_bodies(plan, bodies)


def _crossings(lanes: Lanes) -> dict[Tensor, _Crossing]:
    """Everything that crosses, sender by sender in the order in which it is made."""
    uses = {
        tensor: (name, index, instr)
        for name, steps in lanes.items()
        for index, step in enumerate(steps)
        for tensor, instr in step.needs
    }
    crossings: dict[Tensor, _Crossing] = {}
    for sender, steps in lanes.items():
        for step in steps:
            for tensor, maker in step.makes:
                if tensor not in uses:
                    raise _unmatched(sender, maker, "makes what nobody uses")
                receiver, use, user = uses.pop(tensor)
                if receiver != sender:
                    send = _end(maker, Op.SEND_GRAD, Op.SEND_ACT, sender, receiver)
                    recv = _end(user, Op.RECV_GRAD, Op.RECV_ACT, receiver, sender)
                    crossings[tensor] = _Crossing(sender, send, receiver, recv, use)
    for name, _, instr in uses.values():
        raise _unmatched(name, instr, "needs what nobody makes")
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


def _unmatched(name: GroupName, instr: Instr, what: str) -> UserError:
    text = f"`{instr.op.mnemonic} {instr.microbatch}`"
    return UserError(f"{text} in {name} {what}; `resihp verify` tells more")


def _late(lanes: Lanes, crossings: Mapping[Tensor, _Crossing]) -> _Bodies:
    channels: dict[tuple[GroupName, GroupName], list[_Crossing]] = defaultdict(list)
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
    bodies: _Bodies = {name: [] for name in lanes}
    for name, body in bodies.items():
        for index, step in enumerate(lanes[name]):
            body += recvs.get((name, index), ())
            body += step.instrs
            body += _sends(step, crossings)
    return bodies


def _together(
    lanes: Lanes, crossings: Mapping[Tensor, _Crossing], cost: Mapping[Op, float]
) -> _Bodies:
    bodies: _Bodies = {name: [] for name in lanes}
    for ran in play(lanes, cost):
        bodies[ran.name] += ran.step.instrs
        bodies[ran.name] += _sends(ran.step, crossings)
        for tensor, _ in ran.step.makes:
            if tensor in crossings:
                bodies[crossings[tensor].receiver].append(crossings[tensor].recv)
    return bodies


def _sends(step: Step, crossings: Mapping[Tensor, _Crossing]) -> list[Instr]:
    return [crossings[tensor].send for tensor, _ in step.makes if tensor in crossings]
