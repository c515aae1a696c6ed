"""A plan as one rank's program: peers, chunks and homes resolved.

Between TP degrees a (sender) and b (receiver) a scattered tensor has N = max(a, b) equal chunks;
chunk c goes from sender member c*a//N to receiver member c*b//N, so each crosses once (section 7
of the paper). A transfer that is not scattered goes whole from member i to member i.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from resihp.errors import UserError
from resihp.ir.model import Group, GroupName, Instr, LayerRange, Op, Plan, Stream

__all__ = ["Program", "ProgramInstr", "Transfer", "chunk_routes", "expand"]


class Transfer(NamedTuple):
    """One message of a send or receive: this member's chunk `chunk` of `num_chunks`."""

    peer: int
    """Global rank at the other end."""
    chunk: int
    num_chunks: int


class ProgramInstr(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction of one rank."""

    op: Op
    microbatch: int | None = None
    """Number at home; None for reduce_grads and step."""
    home: int | None = None
    """Logical replica that the micro-batch belongs to; always given where `microbatch` is."""
    transfers: tuple[Transfer, ...] = ()
    """Messages of a send or receive in chunk order; empty for other operations."""
    num_chunks: int = 1
    """Chunks of the whole tensor for scatter, gather, send and receive; 1: not cut."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs in one iteration."""

    rank: int
    group: GroupName
    tp: int
    tp_index: int
    layers: LayerRange
    stage: int
    num_stages: int
    instrs: tuple[ProgramInstr, ...]


class _Route(NamedTuple):
    """What one member does for tensors that cross one stage boundary."""

    op: Op
    direct: tuple[Transfer, ...]
    chunked: tuple[Transfer, ...]
    num_chunks: int


_CUT_BY = {
    Op.SEND_ACT: Op.SCATTER_ACT,
    Op.RECV_ACT: Op.GATHER_ACT,
    Op.SEND_GRAD: Op.SCATTER_GRAD,
    Op.RECV_GRAD: Op.GATHER_GRAD,
}
"""A transfer is cut into chunks if its stream has this instruction for the same micro-batch."""
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
_SENDS = (Op.SEND_ACT, Op.SEND_GRAD)


def chunk_routes(sender_tp: int, receiver_tp: int) -> tuple[tuple[int, int], ...]:
    """(sender member, receiver member) of each of the max(a, b) chunks, in chunk order."""
    num_chunks = max(sender_tp, receiver_tp)
    return tuple(
        (chunk * sender_tp // num_chunks, chunk * receiver_tp // num_chunks)
        for chunk in range(num_chunks)
    )


def expand(plan: Plan, rank: int) -> Program:
    """The program of `rank`.

    Raises `UserError` if the rank is in no group, or if the plan lacks a stream or a peer group
    that the rank needs (a verified plan lacks neither).
    """
    group = plan.group_of(rank)
    if group is None:
        raise UserError(f"rank {rank} is in no group of this plan, so it runs no program")
    stream = _stream_of(plan, group)
    index = group.ranks.index(rank)
    routes = {op: _route(plan, group, index, op) for op in _STAGE_STEP}
    cut = {
        (instr.op, instr.microbatch, instr.home)
        for instr in stream.body
        if instr.op in _CUT_BY.values()
    }
    known: dict[Instr, ProgramInstr] = {}
    instrs: list[ProgramInstr] = []
    for instr in stream.body:
        if instr not in known:
            known[instr] = _resolve(instr, group, routes, cut)
        instrs.append(known[instr])
    return Program(
        rank=rank,
        group=group.name,
        tp=group.tp,
        tp_index=index,
        layers=group.sole_layers,
        stage=group.pp,
        num_stages=plan.mesh.pp,
        instrs=tuple(instrs),
    )


def _stream_of(plan: Plan, group: Group) -> Stream:
    for stream in plan.streams:
        if stream.pp == group.pp and group.replica in stream.replicas:
            return stream
    raise UserError(f"group {group.name} has no stream; `resihp verify` tells more")


def _route(plan: Plan, group: Group, index: int, op: Op) -> _Route | None:
    """Messages of member `index` for `op`; None where the pipeline has no such neighbour."""
    peer = plan.group(group.replica, group.pp + _STAGE_STEP[op])
    if peer is None:
        return None
    sends = op in _SENDS
    pairs = chunk_routes(group.tp, peer.tp) if sends else chunk_routes(peer.tp, group.tp)
    num_chunks = len(pairs)
    chunked: list[Transfer] = []
    for chunk, (source, target) in enumerate(pairs):
        mine, theirs = (source, target) if sends else (target, source)
        if mine == index:
            chunked.append(Transfer(peer.ranks[theirs], chunk, num_chunks))
    direct = (Transfer(peer.ranks[index], 0, 1),) if peer.tp == group.tp else ()
    return _Route(op, direct, tuple(chunked), num_chunks)


def _resolve(
    instr: Instr,
    group: Group,
    routes: dict[Op, _Route | None],
    cut: set[tuple[Op, int | None, int | None]],
) -> ProgramInstr:
    op, microbatch = instr.op, instr.microbatch
    if microbatch is None:
        return ProgramInstr(op=op)
    home = group.replica if instr.home is None else instr.home
    transfer_op = next((sent for sent, by in _CUT_BY.items() if op in (sent, by)), None)
    if transfer_op is None:
        return ProgramInstr(op=op, microbatch=microbatch, home=home)
    route = routes[transfer_op]
    if route is None:
        raise UserError(
            f"{op.mnemonic} {microbatch} in {group.name} has no group at its other end; "
            "`resihp verify` tells more"
        )
    if op != transfer_op:
        return ProgramInstr(op=op, microbatch=microbatch, home=home, num_chunks=route.num_chunks)
    if (_CUT_BY[op], microbatch, instr.home) in cut:
        return ProgramInstr(
            op=op,
            microbatch=microbatch,
            home=home,
            transfers=route.chunked,
            num_chunks=route.num_chunks,
        )
    if not route.direct:
        raise UserError(
            f"{op.mnemonic} {microbatch} in {group.name} meets a group of another TP degree and "
            "is not scattered; `resihp verify` tells more"
        )
    return ProgramInstr(op=op, microbatch=microbatch, home=home, transfers=route.direct)
