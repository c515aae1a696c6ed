"""Tensors from group to group: made, cut, sent, received, joined and used, by the right ends.

Of each kind of tensor there is one per (boundary between stages, micro-batch). One that is used
where it is made is handed over in place; the others have one send and one receive each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resihp.ir.arrays import ABSENT, Arrays, Bits, Ints
from resihp.ir.model import Op
from resihp.ir.verify.fast.grid import Grid, Work

__all__ = [
    "Messages",
    "Tensors",
    "crossing",
    "no_messages",
    "prove_channel_order",
    "prove_flow",
    "prove_handovers",
    "tensors_of",
]


class Tensors(NamedTuple):
    """One kind of tensor, one entry per (boundary, micro-batch); indices of instructions."""

    produce: Ints
    consume: Ints
    sender: Ints
    """Lane that makes it."""
    receiver: Ints
    """Lane that uses it."""
    made_by: Ints
    """Stage that makes it."""
    used_by: Ints
    is_gradient: bool
    stays: Ints
    """Entries that are handed over in place."""
    leaves: Ints | slice
    """The other entries."""


class Messages(NamedTuple):
    """What is sent, one entry per message; indices of instructions, lanes and stages."""

    send: Ints
    recv: Ints
    use: Ints
    """The gather, or else the compute that waits for the tensor."""
    consume: Ints
    sender: Ints
    receiver: Ints
    made_by: Ints
    """Stage that makes the tensor."""
    used_by: Ints

    @property
    def is_cut(self) -> Bits:
        """Which go in chunks."""
        return self.use != self.consume


def tensors_of(work: Work) -> tuple[Tensors, Tensors]:
    """Activations and gradients."""
    columns = work.lane.shape[1]
    stage = np.repeat(np.arange(len(work.lane)), columns)
    forward, backward, lane = work.forward.ravel(), work.backward.ravel(), work.lane.ravel()
    ends = slice(None, len(stage) - columns), slice(columns, None)
    in_place = lane[ends[0]] == lane[ends[1]]
    stays = np.flatnonzero(in_place)
    leaves = np.flatnonzero(~in_place) if len(stays) else slice(None)

    def kind(index: Ints, made: slice, used: slice, *, is_gradient: bool) -> Tensors:
        numbers = (index[made], index[used], lane[made], lane[used], stage[made], stage[used])
        return Tensors(*numbers, is_gradient, stays, leaves)

    return (
        kind(forward, *ends, is_gradient=False),
        kind(backward, *ends[::-1], is_gradient=True),
    )


def crossing(tensors: tuple[Tensors, Tensors]) -> tuple[Ints, Ints]:
    """What makes and what uses each tensor that goes to another group."""
    return (
        np.concatenate([kind.produce[kind.leaves] for kind in tensors]),
        np.concatenate([kind.consume[kind.leaves] for kind in tensors]),
    )


def prove_handovers(tensors: tuple[Tensors, Tensors]) -> bool:
    """What is handed over in place is made before it is used."""
    return all((kind.produce[kind.stays] < kind.consume[kind.stays]).all() for kind in tensors)


def no_messages() -> Messages:
    """None at all."""
    none = np.zeros(0, np.intp)
    return Messages(*[none] * len(Messages._fields))


def prove_flow(arrays: Arrays, grid: Grid, tensors: tuple[Tensors, Tensors]) -> Messages | None:
    """Every tensor reaches its use; no other send, receive, scatter or gather exists."""
    parts = [_prove_kind(arrays, grid, kind) for kind in tensors]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return Messages(*map(np.concatenate, zip(*found, strict=True)))


def _prove_kind(arrays: Arrays, grid: Grid, kind: Tensors) -> Messages | None:
    ops = (Op.SCATTER_ACT, Op.SEND_ACT, Op.RECV_ACT, Op.GATHER_ACT)
    if kind.is_gradient:
        ops = (Op.SCATTER_GRAD, Op.SEND_GRAD, Op.RECV_GRAD, Op.GATHER_GRAD)
    every = [_at_boundaries(grid, op, kind, sends=number < 2) for number, op in enumerate(ops)]
    moves = [move for move in every if move is not None]
    if len(moves) < len(every) or any((move[kind.stays] >= 0).any() for move in moves):
        return None
    scatter, send, recv, gather = (move[kind.leaves] for move in moves)
    produce, consume = kind.produce[kind.leaves], kind.consume[kind.leaves]
    sender, receiver = kind.sender[kind.leaves], kind.receiver[kind.leaves]
    is_cut = scatter >= 0
    if ((gather >= 0) != is_cut).any():
        return None
    use = np.where(is_cut, gather, consume)
    start = arrays.lanes.start
    in_order = (
        (np.where(is_cut, scatter, produce) < send)
        & (produce <= np.where(is_cut, scatter - 1, produce))
        & (send < start[sender + 1])
        & (start[receiver] <= recv)
        & (recv < use)
        & (use <= consume)
    )
    made_by, used_by = kind.made_by[kind.leaves], kind.used_by[kind.leaves]
    part = Messages(send, recv, use, consume, sender, receiver, made_by, used_by)
    return part if in_order.all() and _prove_ends(arrays, part) else None


def _at_boundaries(grid: Grid, op: Op, kind: Tensors, *, sends: bool) -> Ints | None:
    """The table of `op` by boundary; None where it is used at the end of the pipeline."""
    table = grid.tables.get(op)
    if table is None:
        return np.full(len(kind.produce), -1)
    above = sends != kind.is_gradient
    inside, outside = (table[:-1], table[-1]) if above else (table[1:], table[0])
    return None if (outside >= 0).any() else inside.ravel()


def _prove_ends(arrays: Arrays, part: Messages) -> bool:
    """Both ends name each other, and agree on the chunks."""
    lanes, peer = arrays.lanes, arrays.table.peer
    here, there = lanes.replica[part.sender], lanes.replica[part.receiver]
    if (peer == ABSENT).all():
        if (here != there).any():
            return False
    else:
        to, back = peer[arrays.row[part.send]], peer[arrays.row[part.recv]]
        to, back = np.where(to == ABSENT, here, to), np.where(back == ABSENT, there, back)
        if ((to != there) | (back != here)).any():
            return False
    degree, other = lanes.tp[part.sender], lanes.tp[part.receiver]
    is_cut = part.is_cut
    if ((degree != other) & ~is_cut).any():
        return False
    num_chunks = np.maximum(degree, other)[is_cut]
    return not (arrays.plan.batch.tokens % num_chunks).any()


def prove_channel_order(messages: Messages) -> Messages | None:
    """The messages by channel, each in the order of its sends, which is that of its receives.

    They are sorted by receiver, then by send.
    """
    order = np.argsort((messages.receiver << 32) | messages.send)
    ordered = Messages(*(field[order] for field in messages))
    same = (ordered.receiver[1:] == ordered.receiver[:-1]) & (
        ordered.sender[1:] == ordered.sender[:-1]
    )
    if (same & (ordered.recv[1:] < ordered.recv[:-1])).any():
        return None
    return ordered
