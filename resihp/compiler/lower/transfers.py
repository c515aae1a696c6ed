"""Transfers whose sends and receives all streams list in one order.

The schedule is played, and when something ends that another group needs, the send is added to the
one stream and the receive to the other at that moment. All streams follow one order of all
transfers, and in that order the first thing that is not done can always go on: such a plan ends
under every transport, with one queue per rank or without any buffer. What a group hands over to
itself needs no transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resihp.compiler.lower.play import play
from resihp.compiler.lower.steps import Lanes, Step, Tensor, lanes_of, replace_bodies
from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, Op, Plan

__all__ = ["add_transfers_together"]

_Bodies = dict[GroupName, list[Instr]]


class _Crossing(NamedTuple):
    """A tensor that is made in one group and used in another."""

    sender: GroupName
    send: Instr
    receiver: GroupName
    recv: Instr


def add_transfers_together(plan: Plan, cost: Mapping[Op, float]) -> Plan:
    """`plan` with the transfers that its streams need.

    Raises UserError for a tensor without maker or user, and for streams that wait for each other.
    """
    lanes = lanes_of(plan)
    return replace_bodies(plan, _together(lanes, _crossings(lanes), cost))


def _crossings(lanes: Lanes) -> dict[Tensor, _Crossing]:
    """Everything that crosses, sender by sender in the order in which it is made."""
    uses = {
        tensor: (name, instr)
        for name, steps in lanes.items()
        for step in steps
        for tensor, instr in step.needs
    }
    crossings: dict[Tensor, _Crossing] = {}
    for sender, steps in lanes.items():
        for step in steps:
            for tensor, maker in step.makes:
                if tensor not in uses:
                    raise _unmatched(sender, maker, "makes what nobody uses")
                receiver, user = uses.pop(tensor)
                if receiver != sender:
                    send = _end(maker, Op.SEND_GRAD, Op.SEND_ACT, sender, receiver)
                    recv = _end(user, Op.RECV_GRAD, Op.RECV_ACT, receiver, sender)
                    crossings[tensor] = _Crossing(sender, send, receiver, recv)
    for name, instr in uses.values():
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
