"""The pass `chunks`: tensors are cut and joined between groups, always where degrees differ.

Between equal degrees above 1 that divide the tokens, a choice says for each pair of groups
whether tensors are cut: over one adapter that is faster, inside a node it is slower.

A scatter stands right before its send. A gather stands right before the use, however early the
receive: until then each member holds its own chunks only.
"""

from __future__ import annotations

import numpy as np

from resihp.compiler.lower.cuts import Scatter, is_cut
from resihp.compiler.lower.flat import Bits, Flat, Ints, inserted
from resihp.compiler.lower.late import heads_of, tasks_of
from resihp.ir.model import GroupName, Op

__all__ = ["add_chunks"]

_INSTEAD = {
    Op.SEND_ACT: Op.SCATTER_ACT,
    Op.SEND_GRAD: Op.SCATTER_GRAD,
    Op.RECV_ACT: Op.GATHER_ACT,
    Op.RECV_GRAD: Op.GATHER_GRAD,
}
_LARGEST_TABLE = 1 << 24
"""Pairs of groups; beyond, those that there are are sorted."""
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
"""From the stage of a transfer to the stage at its other end."""


def add_chunks(flat: Flat, scatter: Scatter | None = None) -> Flat:
    """`flat` with scatters and gathers where TP degrees differ and where `scatter` says so."""
    plan = flat.layout.plan
    if scatter is None and len({group.tp for group in plan.groups}) == 1:
        return flat
    lane, op = flat.lane, flat.op
    cut = np.flatnonzero(np.array([each in _INSTEAD for each in Op])[op])
    cut = cut[_are_cut(flat, lane, op, cut, scatter)]
    codes = flat.layout.codes
    by_op = np.array([_INSTEAD.get(each, each) for each in Op], np.int64)
    # The same micro-batch and stage; a scatter or a gather names no peer.
    code = flat.code[cut]
    peers = codes.replicas + 1
    code = by_op[op[cut]] * codes.op_unit + code % codes.pair_unit // peers * peers
    sends = _are_sends(op[cut])
    use = _uses_of(flat, lane, op, cut[~sends])
    order = np.argsort(use, kind="stable")
    place = heads_of(flat)[use[order]]
    return inserted(flat, (cut[sends], code[sends]), (place, code[~sends][order]))


def _are_cut(flat: Flat, lane: Ints, op: Ints, at: Ints, scatter: Scatter | None) -> Bits:
    """Of the transfers `at` some places; each pair of groups is asked about once."""
    layout = flat.layout
    groups = {group.name: group for group in layout.plan.groups}
    replica = np.array([name.replica for name in layout.names], np.int64)
    step = np.array([_STAGE_STEP.get(each, 0) for each in Op], np.int64)
    position = np.array(layout.placement.pp, np.int64)
    num_positions = int(position.max()) + 1
    here = replica[lane[at]] * num_positions + position[_stages_of(flat, lane, at)]
    peer = flat.peer(at)
    there = np.where(peer < 0, replica[lane[at]], peer) * num_positions
    there += position[_stages_of(flat, lane, at) + step[op[at]]]
    sends = _are_sends(op[at])
    num_groups = num_positions * layout.codes.replicas
    key = np.where(sends, here * num_groups + there, there * num_groups + here)
    distinct, which = _numbered(key, num_groups**2)
    answers: list[bool] = []
    for pair in distinct.tolist():
        sender, receiver = (
            groups[GroupName(*divmod(end, num_positions))] for end in divmod(pair, num_groups)
        )
        answers.append(is_cut(layout.plan, sender, receiver, scatter))
    return np.array(answers, np.bool_)[which]


def _are_sends(op: Ints) -> Bits:
    return (op == Op.SEND_ACT) | (op == Op.SEND_GRAD)


def _numbered(values: Ints, bound: int) -> tuple[Ints, Ints]:
    """The distinct ones of `values` below `bound`, and for each value which of these it is."""
    if bound > _LARGEST_TABLE:
        return np.unique(values, return_inverse=True)
    seen = np.zeros(bound, np.bool_)
    seen[values] = True
    distinct = np.flatnonzero(seen)
    number = np.empty(bound, np.int64)
    number[distinct] = np.arange(len(distinct))
    return distinct, number[values]


def _stages_of(flat: Flat, lane: Ints, at: Ints) -> Ints:
    """Of transfers; the pass before made them of instructions that have one."""
    stages = flat.layout.placement.stages
    sole = np.array([stages[name.pp][0] for name in flat.layout.names], np.int64)
    said = flat.stage(at)
    return np.where(said < 0, sole[lane[at]], said)


def _uses_of(flat: Flat, lane: Ints, op: Ints, recvs: Ints) -> Ints:
    """Places of the instructions that use what is received."""
    codes = flat.layout.codes
    own = np.array([name.replica for name in flat.layout.names], np.int64)[lane[recvs]]
    home = flat.home(recvs)
    item = np.where(home < 0, own, home) * codes.microbatches + flat.microbatch(recvs)
    stage = _stages_of(flat, lane, recvs)
    forward = tasks_of(flat, lane, op, is_grad=False).of(stage, item)
    backward = tasks_of(flat, lane, op, is_grad=True).of(stage, item)
    return np.where(op[recvs] == Op.RECV_ACT, forward, backward)
