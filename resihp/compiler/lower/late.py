"""Transfers received as late as can be, for all streams at once.

A send stands right after what makes the tensor. A receive stands right before the use, so that
buffers live as short as they can; only where a channel brings a message that is used earlier after
it does a receive move forward, to before that use: both ends of a channel list its messages in
the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resihp.compiler.lower.flat import Bits, Flat, Ints, inserted
from resihp.errors import UserError
from resihp.ir.model import Op

__all__ = ["Tasks", "add_late_transfers", "heads_of", "tasks_of"]


class Tasks(NamedTuple):
    """The forwards, or the activation gradients, of some lanes."""

    at: Ints
    """Places of the instructions."""
    stage: Ints
    item: Ints
    """Home and number as one."""
    where: Ints
    """Place by stage * items + item; -1 where nobody has it."""
    num_items: int

    def of(self, stage: Ints, item: Ints) -> Ints:
        """Place of a task, -1 where nobody has it."""
        return self.where[stage * self.num_items + item]


def add_late_transfers(flat: Flat) -> Flat:
    """`flat` with the transfers that its streams need.

    Raises UserError for an instruction without stage and a tensor without maker or user.
    """
    lane, op, head = flat.lane, flat.op, heads_of(flat)
    forwards = tasks_of(flat, lane, op, is_grad=False)
    backwards = tasks_of(flat, lane, op, is_grad=True)
    ends = [
        _ends(flat, forwards, 1, is_grad=False),
        _ends(flat, backwards, -1, is_grad=True),
    ]
    maker, user = (np.concatenate(parts) for parts in zip(*ends, strict=True))
    crosses = lane[maker] != lane[user]
    maker, user = maker[crosses], user[crosses]
    order = np.argsort(maker, kind="stable")
    maker, user = maker[order], user[order]
    tail = _tails_of(flat)
    is_act = op[maker] == Op.F
    sends = tail[maker] + 1, _transfers(flat, lane, maker, user, is_act, Op.SEND_ACT, Op.SEND_GRAD)
    recvs = _transfers(flat, lane, user, maker, is_act, Op.RECV_ACT, Op.RECV_GRAD)
    place, order = _late(lane, len(flat.start), maker, head[user])
    return inserted(flat, _ascending(*sends), (place, recvs[order]))


def _ascending(place: Ints, codes: Ints) -> tuple[Ints, Ints]:
    # The two of an overlapped pair both send after the second.
    assert not len(place) or bool((np.diff(place) >= 0).all())
    return place, codes


def tasks_of(flat: Flat, lane: Ints, op: Ints, *, is_grad: bool) -> Tasks:
    """All F, or all B and BW.

    Raises UserError for one that names no stage of its group.
    """
    layout = flat.layout
    at = np.flatnonzero((op == Op.B) | (op == Op.BW) if is_grad else op == Op.F)
    sole = [
        held[0] if len(held := layout.placement.stages[name.pp]) == 1 else -1
        for name in layout.names
    ]
    stage = flat.stage(at)
    stage = np.where(stage < 0, np.array(sole, np.int64)[lane[at]], stage)
    position = np.array(layout.placement.pp, np.int64)
    here = np.array([name.pp for name in layout.names], np.int64)[lane[at]]
    unclear = np.flatnonzero((stage < 0) | (position[np.maximum(stage, 0)] != here))
    if len(unclear):
        raise UserError(f"{_spell(flat, int(at[unclear[0]]))} names no stage of its group")
    home = flat.home(at)
    own = np.array([name.replica for name in layout.names], np.int64)[lane[at]]
    item = np.where(home < 0, own, home) * layout.codes.microbatches + flat.microbatch(at)
    num_items = layout.codes.microbatches * layout.codes.replicas
    where = np.full(layout.codes.stages * num_items, -1, np.int64)
    where[stage * num_items + item] = at
    return Tasks(at, stage, item, where, num_items)


def _ends(flat: Flat, tasks: Tasks, step: int, *, is_grad: bool) -> tuple[Ints, Ints]:
    """Places of maker and user of every tensor that goes from stage to stage.

    Raises UserError for one that has not both, each once.
    """
    last = flat.layout.codes.stages - 1
    makes = tasks.stage != (0 if is_grad else last)
    uses = tasks.stage != (last if is_grad else 0)
    maker = tasks.at[makes]
    user = tasks.of(tasks.stage[makes] + step, tasks.item[makes])
    again = tasks.of(tasks.stage, tasks.item)[makes] != maker
    _require(flat, maker, (user >= 0) & ~again, "makes what nobody uses")
    known = tasks.of(tasks.stage[uses] - step, tasks.item[uses])
    twice = tasks.of(tasks.stage, tasks.item)[uses] != tasks.at[uses]
    _require(flat, tasks.at[uses], (known >= 0) & ~twice, "needs what nobody makes")
    return maker, user


def _require(flat: Flat, at: Ints, holds: Bits, what: str) -> None:
    bad = at[~holds]
    if len(bad):
        raise UserError(f"{_spell(flat, int(bad[0]))} {what}; `resihp verify` tells more")


def _spell(flat: Flat, at: int) -> str:
    instr = flat.layout.codes.decode(int(flat.code[at]))
    name = flat.layout.names[int(np.searchsorted(flat.start, at, side="right")) - 1]
    return f"`{instr.op.mnemonic} {instr.microbatch}` in {name}"


def heads_of(flat: Flat) -> Ints:
    """Of each instruction the first of those that are overlapped with it."""
    begins = np.concatenate(([True], ~flat.paired[:-1]))[: len(flat.code)]
    return np.maximum.accumulate(np.where(begins, np.arange(len(flat.code)), 0))


def _tails_of(flat: Flat) -> Ints:
    """Of each instruction the last of those that are overlapped with it."""
    num = len(flat.code)
    last = np.where(flat.paired, num, np.arange(num))
    return np.minimum.accumulate(last[::-1])[::-1]


def _transfers(
    flat: Flat, lane: Ints, here: Ints, there: Ints, is_act: Bits, act: Op, grad: Op
) -> Ints:
    """Codes of the sends, or receives, that go with the instructions `here`."""
    codes = flat.layout.codes
    replica = np.array([name.replica for name in flat.layout.names], np.int64)
    mine, other = replica[lane[here]], replica[lane[there]]
    op = np.where(is_act, int(act), int(grad))
    # What the compute says of stage, micro-batch and home; it names no peer.
    rest = flat.code[here] % codes.pair_unit
    return op * codes.op_unit + rest + np.where(mine == other, 0, other + 1)


def _late(lane: Ints, num_lanes: int, maker: Ints, use: Ints) -> tuple[Ints, Ints]:
    """Where each message is received, ascending, and which one that is.

    `maker` ascends. Channels come in the order of their first messages.
    """
    num = len(maker)
    if not num:
        return use, np.arange(0)
    channel = lane[maker] * num_lanes + lane[use]
    _, first, which = np.unique(channel, return_index=True, return_inverse=True)
    order = np.argsort(first[which] * num + np.arange(num))
    # Backwards through each channel, the earliest use so far; channels are kept apart by offsets.
    segment = np.cumsum(np.diff(first[which][order], prepend=-1) != 0)
    offset = segment * (int(use.max()) + 1)
    place = np.minimum.accumulate((use[order] + offset)[::-1])[::-1] - offset
    by_place = np.argsort(place, kind="stable")
    return place[by_place], order[by_place]
