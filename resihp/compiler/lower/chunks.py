"""The pass `chunks`: tensors are cut and joined between groups, always where degrees differ.

Between equal degrees above 1 that divide the tokens, a choice says for each pair of groups
whether tensors are cut: over one adapter that is faster, inside a node it is slower.

A scatter stands right before its send. A gather stands right before the use, however early the
receive: until then each member holds its own chunks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from resihp.compiler.lower.steps import bodies_of, replace_bodies, slots
from resihp.ir.model import Group, GroupName, Instr, Op, Plan
from resihp.ir.placement import placement_of

__all__ = ["Scatter", "add_chunks", "cuts_of", "everywhere"]

Scatter = Callable[[Group, Group], bool]
"""Whether tensors from a group to another one of equal degree are cut."""

_SCATTER = {Op.SEND_ACT: Op.SCATTER_ACT, Op.SEND_GRAD: Op.SCATTER_GRAD}
_GATHER = {Op.RECV_ACT: Op.GATHER_ACT, Op.RECV_GRAD: Op.GATHER_GRAD}
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
"""From the stage of a transfer to the stage at its other end."""


def everywhere(sender: Group, receiver: Group) -> bool:
    """The choice to cut wherever it can be done."""
    return sender.tp == receiver.tp


def add_chunks(plan: Plan, scatter: Scatter | None = None) -> Plan:
    """`plan` with scatters and gathers where TP degrees differ and where `scatter` says so."""
    groups = {group.name: group for group in plan.groups}
    if scatter is None and len({group.tp for group in plan.groups}) == 1:
        return plan
    placement = placement_of(plan)

    def is_cut(name: GroupName, instr: Instr) -> bool:
        stage = placement.stage_of(name.pp, instr)
        assert stage is not None, "the pass before made it of a compute instruction"
        replica = name.replica if instr.peer is None else instr.peer
        here = groups[name]
        there = groups[GroupName(replica, placement.pp[stage + _STAGE_STEP[instr.op]])]
        if instr.op in _SCATTER:
            return _is_cut(plan, here, there, scatter)
        return _is_cut(plan, there, here, scatter)

    bodies = {
        name: list(_chunked(body, lambda instr, name=name: is_cut(name, instr)))
        for name, body in bodies_of(plan).items()
    }
    return replace_bodies(plan, bodies)


def cuts_of(plan: Plan, scatter: Scatter) -> Callable[[int], tuple[bool, ...]]:
    """Of a replica: what `scatter` says of its own edges, in both directions."""
    groups = {group.name: group for group in plan.groups}
    at = placement_of(plan).pp
    hops = [hop for hop in dict.fromkeys(pairwise(at)) if hop[0] != hop[1]]

    def cuts(replica: int) -> tuple[bool, ...]:
        found: list[bool] = []
        for one, other in hops:
            here, there = groups.get(GroupName(replica, one)), groups.get(GroupName(replica, other))
            if here is not None and there is not None:
                found.append(_is_cut(plan, here, there, scatter))
                found.append(_is_cut(plan, there, here, scatter))
        return tuple(found)

    return cuts


def _is_cut(plan: Plan, sender: Group, receiver: Group, scatter: Scatter | None) -> bool:
    """Unequal degrees have no choice; nor have single ranks, or tokens that do not divide."""
    if sender.tp != receiver.tp:
        return True
    can_be = sender.tp > 1 and plan.batch.tokens % sender.tp == 0
    return can_be and scatter is not None and scatter(sender, receiver)


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
