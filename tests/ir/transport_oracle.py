"""Which plans reach their end under a transport, rank by rank and message by message.

Slow and obvious, and written from the definitions in `resihp.ir.transport` alone: every rank has
its own program, its own lists of posted messages and its own place; members of a TP group wait
for each other at F, B, BW and gathers; in each round everything that may happen happens.
"""

from __future__ import annotations

from typing import NamedTuple

from plan_oracle import stages_of

from resihp.ir.model import Group, GroupName, Instr, Op, Plan

COLLECTIVE = (Op.F, Op.B, Op.BW, Op.GATHER_ACT, Op.GATHER_GRAD)
SENDS = {Op.SEND_ACT: ("act", 1), Op.SEND_GRAD: ("grad", -1)}
RECVS = {Op.RECV_ACT: ("act", -1), Op.RECV_GRAD: ("grad", 1)}
CUTS = {Op.SEND_ACT: Op.SCATTER_ACT, Op.SEND_GRAD: Op.SCATTER_GRAD}
USES = {
    Op.RECV_ACT: (Op.GATHER_ACT, Op.F),
    Op.RECV_GRAD: (Op.GATHER_GRAD, Op.B, Op.BW),
}


class Doing(NamedTuple):
    """An instruction with its stage and its micro-batch's home written out."""

    op: Op
    stage: int | None
    microbatch: int | None
    home: int | None
    peer: int
    paired: bool


class Message:
    """One chunk on its way from rank to rank."""

    def __init__(self, source: int, target: int, num_bytes: int) -> None:
        self.source, self.target, self.num_bytes = source, target, num_bytes
        self.done = self.sent = self.received = False


class Rank:
    def __init__(self, group: Group, body: list[Doing]) -> None:
        self.group, self.body, self.at = group, body, 0
        self.posts: dict[int, list[Message]] = {}
        self.needs: dict[int, list[Message]] = {}
        self.pending: list[Message] = []
        """What this rank has posted and what is not done, in order."""
        self.untaken: dict[int, list[Message]] = {}
        """What this rank has sent and a peer has not received, in order."""


def finishes(plan: Plan, transport: str, whole_bytes: int = 0) -> bool:
    """Whether every rank reaches its end; every message must have one send and one receive."""
    ranks = ranks_of(plan, whole_bytes)
    moved = True
    while moved:
        moved = any(_step(rank, ranks, transport) for rank in ranks.values())
        moved = _deliver(ranks, transport) or moved
    return all(rank.at == len(rank.body) for rank in ranks.values())


def bodies_of(plan: Plan) -> dict[GroupName, list[Doing]]:
    stages = stages_of(plan)

    def spell(instr: Instr, replica: int, pp: int) -> Doing:
        stage = stages[pp][0] if instr.stage is None and instr.op.has_stage else instr.stage
        home = replica if instr.home is None and instr.op.has_micro_batch else instr.home
        peer = replica if instr.peer is None else instr.peer
        return Doing(instr.op, stage, instr.microbatch, home, peer, instr.paired)

    return {
        GroupName(replica, stream.pp): [spell(instr, replica, stream.pp) for instr in stream.body]
        for stream in plan.streams
        for replica in stream.replicas
    }


def find(body: list[Doing], op: Op, stage: int | None, like: Doing | None = None) -> int | None:
    """Where `op` of the stage stands, for the micro-batch of `like` if that is given."""
    for index, doing in enumerate(body):
        is_like = like is None or (doing.microbatch, doing.home) == (like.microbatch, like.home)
        if is_like and doing.op is op and doing.stage == stage:
            return index
    return None


def _position(plan: Plan, stage: int) -> int:
    return next(pp for pp, held in stages_of(plan).items() if stage in held)


def ranks_of(plan: Plan, whole_bytes: int) -> dict[int, Rank]:
    bodies = bodies_of(plan)
    groups = {group.name: group for group in plan.groups}
    ranks = {
        rank: Rank(group, bodies[name]) for name, group in groups.items() for rank in group.ranks
    }
    for name, body in bodies.items():
        for index, doing in enumerate(body):
            if doing.op not in SENDS:
                continue
            assert doing.stage is not None
            kind, step = SENDS[doing.op]
            far_stage = doing.stage + step
            far = GroupName(doing.peer, _position(plan, far_stage))
            here, there, far_body = groups[name], groups[far], bodies[far]
            recv_op = Op.RECV_ACT if kind == "act" else Op.RECV_GRAD
            recv = find(far_body, recv_op, far_stage, doing)
            uses = [find(far_body, op, far_stage, doing) for op in USES[recv_op]]
            use = min(use for use in uses if use is not None)
            assert recv is not None and recv < use
            if use and far_body[use - 1].paired:
                use -= 1  # both of a pair start together
            cut = find(body, CUTS[doing.op], doing.stage, doing) is not None
            pieces = max(len(here.ranks), len(there.ranks)) if cut else len(here.ranks)
            for chunk in range(pieces):
                source = here.ranks[chunk * len(here.ranks) // pieces]
                target = there.ranks[chunk * len(there.ranks) // pieces]
                message = Message(source, target, whole_bytes // (pieces if cut else 1))
                ranks[source].posts.setdefault(index, []).append(message)
                ranks[target].posts.setdefault(recv, []).append(message)
                ranks[target].needs.setdefault(use, []).append(message)
    return ranks


def _step(rank: Rank, ranks: dict[int, Rank], transport: str) -> bool:
    """Whether the rank (with its whole group, at a collective) goes one instruction on."""
    if rank.at == len(rank.body):
        return False
    op, stage = rank.body[rank.at][:2]
    if op in (Op.REDUCE_GRADS, Op.STEP):
        meetings = [(other, find(other.body, op, stage)) for other in ranks.values()]
        if any(index is not None and other.at < index for other, index in meetings):
            return False
    if op in COLLECTIVE:
        members = [ranks[number] for number in rank.group.ranks]
        if any(member.at < rank.at for member in members):
            return False
        if any(not m.done for member in members for m in member.needs.get(rank.at, ())):
            return False
    posts = rank.posts.get(rank.at, [])
    for message in posts:
        if op in SENDS and not message.sent:
            message.sent = True
            rank.pending.append(message)
            rank.untaken.setdefault(message.target, []).append(message)
        elif op in RECVS:
            message.received = True
            rank.pending.append(message)
    if op in SENDS and transport.startswith("eager="):
        capacity = int(transport.removeprefix("eager="))
        if not all(_fits(rank, message, capacity) for message in posts):
            return False
    rank.at += 1
    return True


def _fits(rank: Rank, message: Message, capacity: int) -> bool:
    untaken = rank.untaken[message.target]
    if message not in untaken:
        return True
    ahead = untaken[: untaken.index(message) + 1]
    return sum(m.num_bytes for m in ahead) <= capacity


def _deliver(ranks: dict[int, Rank], transport: str) -> bool:
    """End every transfer that may end now; whether there was one."""
    changed = False
    for rank in ranks.values():
        for message in [m for m in rank.pending if not m.done]:
            ends = ranks[message.source], ranks[message.target]
            if transport in ("pair", "rank"):
                message.done = all(_is_head(end, message, transport) for end in ends)
            else:
                message.done = message.sent
            changed = changed or message.done
            if message.done and transport in ("pair", "rank"):
                break  # what is at the head has changed
    for rank in ranks.values():
        rank.pending = [m for m in rank.pending if not m.done]
        for untaken in rank.untaken.values():
            while untaken and untaken[0].received:
                del untaken[0]
                changed = True
    return changed


def _is_head(rank: Rank, message: Message, transport: str) -> bool:
    """Whether the rank has posted the message, and nothing that is not done before it."""
    ends = {message.source, message.target}
    waiting = (
        m
        for m in rank.pending
        if not m.done and (transport == "rank" or {m.source, m.target} == ends)
    )
    return next(waiting, None) is message


COST = {Op.F: 1, Op.B: 1, Op.W: 1, Op.BW: 2}


def makespan(plan: Plan) -> float:
    """When all is done under `edge` with unlimited speed: relax all times until none changes.

    Both of a pair start once the inputs of both are there, and run one after the other.
    """
    bodies = bodies_of(plan)
    ends = {(name, index): 0.0 for name, body in bodies.items() for index in range(len(body))}
    waits = {place: _waits(plan, bodies, *place) for place in ends}
    while True:
        before = dict(ends)
        for name, body in bodies.items():
            time = 0.0
            for index, doing in enumerate(body):
                time = max([time, *(before[place] for place in waits[name, index])])
                time += COST.get(doing.op, 0)
                ends[name, index] = time
        if ends == before:
            return max(ends.values())


def _waits(
    plan: Plan, bodies: dict[GroupName, list[Doing]], name: GroupName, index: int
) -> list[tuple[GroupName, int]]:
    """The instructions of other groups that must have ended before this one may start."""
    doing = bodies[name][index]
    if doing.op in (Op.REDUCE_GRADS, Op.STEP):
        meetings = {other: find(body, doing.op, doing.stage) for other, body in bodies.items()}
        return [(other, at - 1) for other, at in meetings.items() if at]
    both = [doing, *([bodies[name][index + 1]] if doing.paired else [])]
    return [
        place
        for needs in both
        for recv_op, uses in USES.items()
        if needs.op in uses
        if (place := _source(plan, bodies, name, recv_op, needs)) is not None
    ]


def _source(
    plan: Plan, bodies: dict[GroupName, list[Doing]], name: GroupName, recv_op: Op, use: Doing
) -> tuple[GroupName, int] | None:
    """The send of what `use` needs; None if that is made here."""
    recv = find(bodies[name], recv_op, use.stage, use)
    if recv is None:
        return None
    assert use.stage is not None
    send_op = Op.SEND_ACT if recv_op is Op.RECV_ACT else Op.SEND_GRAD
    stage = use.stage + RECVS[recv_op][1]
    sender = GroupName(bodies[name][recv].peer, _position(plan, stage))
    send = find(bodies[sender], send_op, stage, use)
    assert send is not None
    return sender, send
