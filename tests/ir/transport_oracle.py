"""Which plans reach their end under a transport, rank by rank and message by message.

Slow and obvious, and written from the definitions in `resihp.ir.transport` alone: every rank has
its own program, its own lists of posted messages and its own place; members of a TP group wait
for each other at F, B, BW and gathers; in each round everything that may happen happens.
"""

from __future__ import annotations

from resihp.ir.model import Group, Instr, Op, Plan

COLLECTIVE = (Op.F, Op.B, Op.BW, Op.GATHER_ACT, Op.GATHER_GRAD)
SENDS = {Op.SEND_ACT: ("act", 1), Op.SEND_GRAD: ("grad", -1)}
RECVS = {Op.RECV_ACT: ("act", -1), Op.RECV_GRAD: ("grad", 1)}
CUTS = {Op.SEND_ACT: Op.SCATTER_ACT, Op.SEND_GRAD: Op.SCATTER_GRAD}
USES = {
    Op.RECV_ACT: (Op.GATHER_ACT, Op.F),
    Op.RECV_GRAD: (Op.GATHER_GRAD, Op.B, Op.BW),
}


class Message:
    """One chunk on its way from rank to rank."""

    def __init__(self, source: int, target: int, num_bytes: int) -> None:
        self.source, self.target, self.num_bytes = source, target, num_bytes
        self.done = self.sent = self.received = False


class Rank:
    def __init__(self, group: Group, body: tuple[Instr, ...]) -> None:
        self.group, self.body, self.at = group, body, 0
        self.posts: dict[int, list[Message]] = {}
        self.needs: dict[int, list[Message]] = {}
        self.pending: list[Message] = []
        """What this rank has posted and what is not done, in order."""
        self.untaken: dict[int, list[Message]] = {}
        """What this rank has sent and a peer has not received, in order."""


def finishes(plan: Plan, transport: str, whole_bytes: int = 0) -> bool:
    """Whether every rank reaches its end; every message must have one send and one receive."""
    ranks = _ranks(plan, whole_bytes)
    moved = True
    while moved:
        moved = any(_step(rank, ranks, transport) for rank in ranks.values())
        moved = _deliver(ranks, transport) or moved
    return all(rank.at == len(rank.body) for rank in ranks.values())


def _bodies(plan: Plan) -> dict[tuple[int, int], tuple[Instr, ...]]:
    """Per (replica, stage), with the home of every micro-batch written out."""
    return {
        (replica, stream.pp): tuple(
            Instr(instr.op, instr.microbatch, replica)
            if instr.op.has_micro_batch and instr.home is None
            else instr
            for instr in stream.body
        )
        for stream in plan.streams
        for replica in stream.replicas
    }


def _ranks(plan: Plan, whole_bytes: int) -> dict[int, Rank]:
    bodies = _bodies(plan)
    groups = {(g.replica, g.pp): g for g in plan.groups}
    ranks = {
        rank: Rank(group, bodies[key]) for key, group in groups.items() for rank in group.ranks
    }
    for (replica, stage), body in bodies.items():
        here = groups[replica, stage]
        for index, instr in enumerate(body):
            if instr.op not in SENDS:
                continue
            kind, step = SENDS[instr.op]
            there = groups[replica, stage + step]
            far_body = bodies[replica, stage + step]
            recv_op = Op.RECV_ACT if kind == "act" else Op.RECV_GRAD
            recv = far_body.index(Instr(recv_op, instr.microbatch, instr.home))
            cut = Instr(CUTS[instr.op], instr.microbatch, instr.home) in body
            pieces = max(len(here.ranks), len(there.ranks)) if cut else len(here.ranks)
            for chunk in range(pieces):
                source = here.ranks[chunk * len(here.ranks) // pieces]
                target = there.ranks[chunk * len(there.ranks) // pieces]
                message = Message(source, target, whole_bytes // (pieces if cut else 1))
                ranks[source].posts.setdefault(index, []).append(message)
                ranks[target].posts.setdefault(recv, []).append(message)
                use = next(
                    i
                    for i in range(recv + 1, len(far_body))
                    if far_body[i].op in USES[recv_op]
                    and (far_body[i].microbatch, far_body[i].home) == (instr.microbatch, instr.home)
                )
                ranks[target].needs.setdefault(use, []).append(message)
    return ranks


def _step(rank: Rank, ranks: dict[int, Rank], transport: str) -> bool:
    """Whether the rank (with its whole group, at a collective) goes one instruction on."""
    if rank.at == len(rank.body):
        return False
    op = rank.body[rank.at].op
    if op in (Op.REDUCE_GRADS, Op.STEP):
        others = [
            other for other in ranks.values() if op is Op.STEP or other.group.pp == rank.group.pp
        ]
        if any(other.at < other.body.index(Instr(op)) for other in others):
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
    """When all is done under `edge` with unlimited speed: relax all times until none changes."""
    bodies = _bodies(plan)
    ends = {(*key, i): 0.0 for key, body in bodies.items() for i in range(len(body))}
    while True:
        before = dict(ends)
        for (replica, stage), body in bodies.items():
            received: set[tuple[Op, int | None, int | None]] = set()
            time = 0.0
            for index, instr in enumerate(body):
                if instr.op in RECVS:
                    received.add((instr.op, instr.microbatch, instr.home))
                for recv_op, (_, step) in RECVS.items():
                    key = recv_op, instr.microbatch, instr.home
                    if instr.op in USES[recv_op] and key in received:
                        far = bodies[replica, stage + step]
                        send_op = Op.SEND_ACT if recv_op is Op.RECV_ACT else Op.SEND_GRAD
                        sent = far.index(Instr(send_op, instr.microbatch, instr.home))
                        time = max(time, before[replica, stage + step, sent])
                if instr.op in (Op.REDUCE_GRADS, Op.STEP):
                    for (r, s), other in bodies.items():
                        if instr.op is Op.STEP or s == stage:
                            at = other.index(instr)
                            time = max(time, before[r, s, at - 1] if at else 0.0)
                time += COST.get(instr.op, 0)
                ends[replica, stage, index] = time
        if ends == before:
            return max(ends.values())
