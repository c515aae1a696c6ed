"""A plan as one rank's program: peers, chunks, stages and homes resolved.

Between TP degrees a (sender) and b (receiver) a scattered tensor has N = max(a, b) equal chunks;
chunk c goes from sender member c*a//N to receiver member c*b//N, so each crosses once (section 7
of the paper). A transfer that is not scattered goes whole from member i to member i.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from resihp.errors import UserError
from resihp.ir.model import Group, Instr, Level, Op, Plan, Stream
from resihp.ir.placement import placement_of
from resihp.ir.program import Program, ProgramInstr, Transfer, boundary_type

__all__ = ["chunk_routes", "expand"]


class _Route(NamedTuple):
    """What one member does for tensors that cross from its group to another, or back."""

    direct: tuple[Transfer, ...]
    chunked: tuple[Transfer, ...]
    num_chunks: int


class _Key(NamedTuple):
    """A tensor that crosses stages, as this group names it."""

    op: Op
    """The send or receive."""
    stage: int
    home: int
    microbatch: int


_TRANSFER_OF = {
    Op.SCATTER_ACT: Op.SEND_ACT,
    Op.GATHER_ACT: Op.RECV_ACT,
    Op.SCATTER_GRAD: Op.SEND_GRAD,
    Op.GATHER_GRAD: Op.RECV_GRAD,
}
"""A transfer is cut into chunks if its stream has this instruction for the same tensor."""
_STAGE_STEP = {Op.SEND_ACT: 1, Op.RECV_ACT: -1, Op.SEND_GRAD: -1, Op.RECV_GRAD: 1}
_SENDS = (Op.SEND_ACT, Op.SEND_GRAD)
_MORE = "`resihp verify` tells more"


def chunk_routes(sender_tp: int, receiver_tp: int) -> tuple[tuple[int, int], ...]:
    """(sender member, receiver member) of each of the max(a, b) chunks, in chunk order."""
    num_chunks = max(sender_tp, receiver_tp)
    return tuple(
        (chunk * sender_tp // num_chunks, chunk * receiver_tp // num_chunks)
        for chunk in range(num_chunks)
    )


def expand(plan: Plan, rank: int) -> Program:
    """The program of `rank`.

    Raises `UserError` if the plan is only a schedule, if the rank is in no group, or if the plan
    lacks a stream or a peer group that the rank needs (a verified plan lacks neither).
    """
    if plan.level is Level.SCHEDULE:
        raise UserError("a schedule does not say who sends what: `resihp lower` makes it a plan")
    group = plan.group_of(rank)
    if group is None:
        raise UserError(f"rank {rank} is in no group of this plan, so it runs no program")
    stream = _stream_of(plan, group)
    index = group.ranks.index(rank)
    resolve = _Resolver(plan, group, index, stream).resolve
    known: dict[Instr, ProgramInstr] = {}
    instrs: list[ProgramInstr] = []
    for instr in stream.body:
        if instr not in known:
            known[instr] = resolve(instr)
        instrs.append(known[instr])
    placement = placement_of(plan)
    return Program(
        model=plan.model,
        mesh=plan.mesh,
        batch=plan.batch,
        rank=rank,
        group=group.name,
        tp_index=index,
        tp=group.tp,
        layers=group.layers,
        stages=placement.stages[group.pp],
        num_stages=placement.num_stages,
        instrs=tuple(instrs),
        precision=plan.precision,
        recompute=plan.recompute,
    )


def _stream_of(plan: Plan, group: Group) -> Stream:
    for stream in plan.streams:
        if stream.pp == group.pp and group.replica in stream.replicas:
            return stream
    raise UserError(f"group {group.name} has no stream; {_MORE}")


class _Resolver:
    """The instructions of one member of a group."""

    def __init__(self, plan: Plan, group: Group, index: int, stream: Stream) -> None:
        self.plan = plan
        self.group = group
        self.index = index
        self.placement = placement_of(plan)
        self.routes: dict[tuple[Op, int, int], _Route | None] = {}
        self.peers: dict[_Key, int] = {}
        """Replica at the other end of each send and receive that is not this one."""
        self.cut: set[_Key] = set()
        """Sends that are scattered and receives that are gathered."""
        for instr in stream.body:
            if instr.op in _STAGE_STEP and instr.peer is not None:
                self.peers[self._key(instr, instr.op)] = instr.peer
            elif instr.op in _TRANSFER_OF:
                self.cut.add(self._key(instr, _TRANSFER_OF[instr.op]))

    def resolve(self, instr: Instr) -> ProgramInstr:
        """`instr` with everything that the plan leaves to defaults."""
        op = instr.op
        if not op.has_stage:
            return ProgramInstr(op=op)
        stage = self._stage(instr)
        if instr.microbatch is None:
            return ProgramInstr(op=op, stage=stage)
        transfer = _TRANSFER_OF.get(op, op)
        key = self._key(instr, transfer)
        what = ProgramInstr(
            op=op, microbatch=key.microbatch, home=key.home, stage=stage, paired=instr.paired
        )
        if transfer not in _STAGE_STEP:
            return what
        route = self._route(key, instr)
        cut = op is not transfer or key in self.cut
        num_chunks = route.num_chunks if cut else 1
        if op is not transfer:
            return replace(what, num_chunks=num_chunks)
        if not (cut or route.direct):
            raise UserError(
                f"{self._text(instr)} meets a group of another TP degree and is not scattered; "
                f"{_MORE}"
            )
        return replace(
            what,
            transfers=route.chunked if cut else route.direct,
            tensor=boundary_type(self.plan, num_chunks),
            num_chunks=num_chunks,
        )

    def _stage(self, instr: Instr) -> int:
        stage = self.placement.stage_of(self.group.pp, instr)
        if stage is None:
            raise UserError(f"{self._text(instr)} names no stage that is there; {_MORE}")
        return stage

    def _key(self, instr: Instr, transfer: Op) -> _Key:
        home = self.group.replica if instr.home is None else instr.home
        if instr.microbatch is None:
            raise UserError(f"{self._text(instr)} names no micro-batch; {_MORE}")
        return _Key(transfer, self._stage(instr), home, instr.microbatch)

    def _text(self, instr: Instr) -> str:
        number = "" if instr.microbatch is None else f" {instr.microbatch}"
        return f"{instr.op.mnemonic}{number} in {self.group.name}"

    def _route(self, key: _Key, instr: Instr) -> _Route:
        replica = self.peers.get(key, self.group.replica)
        place = key.op, key.stage, replica
        if place not in self.routes:
            self.routes[place] = self._find_route(*place)
        route = self.routes[place]
        if route is None:
            raise UserError(f"{self._text(instr)} has no group at its other end; {_MORE}")
        return route

    def _find_route(self, op: Op, stage: int, replica: int) -> _Route | None:
        """Messages of this member; None where nobody else is at the other end."""
        far = stage + _STAGE_STEP[op]
        if not 0 <= far < self.placement.num_stages:
            return None
        group, peer = self.group, self.plan.group(replica, self.placement.pp[far])
        if peer is None or peer.name == group.name:
            return None
        sends = op in _SENDS
        pairs = chunk_routes(group.tp, peer.tp) if sends else chunk_routes(peer.tp, group.tp)
        num_chunks = len(pairs)
        chunked: list[Transfer] = []
        for chunk, (source, target) in enumerate(pairs):
            mine, theirs = (source, target) if sends else (target, source)
            if mine == self.index:
                chunked.append(Transfer(peer.ranks[theirs], chunk, num_chunks))
        direct = (Transfer(peer.ranks[self.index], 0, 1),) if peer.tp == group.tp else ()
        return _Route(direct, tuple(chunked), num_chunks)
