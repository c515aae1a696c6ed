"""Slow, obvious versions of what the verifier decides: run the streams, one message at a time.

Members of a group run the same stream, so one machine per (replica, stage) is enough. A channel
is a list; the first posted receive takes its head and must find what it expects. Nothing waits
but what needs a tensor, which is the `edge` transport; `transport_oracle` has the others.
"""

from __future__ import annotations

from typing import NamedTuple

from resihp.ir.facts import StageFacts
from resihp.ir.model import GroupName, Instr, Op, Plan


class RefusedError(Exception):
    """The plan cannot run, or computes something wrong."""


class Message(NamedTuple):
    kind: str
    micro_batch: tuple[int, int]
    cut: bool


class Machine:
    """One (replica, stage) with what it holds."""

    def __init__(self, plan: Plan, name: GroupName, body: tuple[Instr, ...]) -> None:
        self.plan, self.name, self.body = plan, name, body
        self.at = 0
        self.have: set[tuple[str, tuple[int, int]]] = set()
        self.done: list[tuple[Op, tuple[int, int]]] = []
        self.reduced = self.stepped = False
        self.posted: dict[GroupName, list[tuple[str, tuple[int, int]]]] = {}
        """Receives that wait, by peer."""

    def need(self, *things: tuple[str, tuple[int, int]]) -> None:
        for thing in things:
            if thing not in self.have:
                raise RefusedError(f"{self.name} at {self.at}: no {thing}")

    def make(self, what: str, micro_batch: tuple[int, int]) -> None:
        if (what, micro_batch) in self.have:
            raise RefusedError(f"{self.name} at {self.at}: {what} of {micro_batch} twice")
        self.have.add((what, micro_batch))


def run(plan: Plan) -> None:
    """Run `plan` to the end; raise `RefusedError` where it fails, hangs or leaves work undone."""
    machines = {
        GroupName(replica, stream.pp): Machine(plan, GroupName(replica, stream.pp), stream.body)
        for stream in plan.streams
        for replica in stream.replicas
    }
    channels: dict[tuple[GroupName, GroupName], list[Message]] = {}
    moved = True
    while moved:
        moved = False
        for machine in machines.values():
            while machine.at < len(machine.body) and _step(machine, machines, channels):
                machine.at += 1
                moved = True
            _deliver(machine, channels)
    for machine in machines.values():
        if machine.at < len(machine.body):
            raise RefusedError(f"{machine.name} hangs at {machine.at}")
        if not (machine.reduced and machine.stepped):
            raise RefusedError(f"{machine.name} never reduced or stepped")
    if any(channels.values()) or any(any(m.posted.values()) for m in machines.values()):
        raise RefusedError("messages are left over")
    _all_done(plan, machines)


def _all_done(plan: Plan, machines: dict[GroupName, Machine]) -> None:
    for stage in range(plan.mesh.pp):
        done = [entry for m in machines.values() if m.name.pp == stage for entry in m.done]
        for home in range(plan.mesh.dp):
            for number in range(plan.batch.microbatches):
                ops = sorted(op for op, micro_batch in done if micro_batch == (home, number))
                if ops not in ([Op.F, Op.B, Op.W], [Op.F, Op.BW]):
                    raise RefusedError(f"stage {stage} ran {ops} of {number}@{home}")


def _step(
    machine: Machine,
    machines: dict[GroupName, Machine],
    channels: dict[tuple[GroupName, GroupName], list[Message]],
) -> bool:
    """Whether the machine's instruction could run."""
    _deliver(machine, channels)
    instr = machine.body[machine.at]
    op, plan = instr.op, machine.plan
    if op in (Op.REDUCE_GRADS, Op.STEP):
        return _meet(machine, machines, op)
    if machine.reduced:
        raise RefusedError("work after reduce_grads")
    assert instr.microbatch is not None
    home = machine.name.replica if instr.home is None else instr.home
    micro_batch = (home, instr.microbatch)
    if home >= plan.mesh.dp or instr.microbatch >= plan.batch.microbatches:
        raise RefusedError("no such micro-batch")
    if op in (Op.F, Op.B, Op.W, Op.BW):
        return _compute(machine, op, micro_batch)
    return _transfer(machine, machines, channels, op, micro_batch)


def _deliver(machine: Machine, channels: dict[tuple[GroupName, GroupName], list[Message]]) -> None:
    """Give what has arrived to the receives that are posted, in order."""
    for peer, waiting in machine.posted.items():
        queue = channels.get((peer, machine.name), [])
        while queue and waiting:
            message, (kind, micro_batch) = queue.pop(0), waiting.pop(0)
            if message[:2] != (kind, micro_batch):
                raise RefusedError(f"{machine.name} takes {message} for {micro_batch}")
            what = "received chunks of" if message.cut else f"input {kind}"
            machine.make(what, micro_batch)
            machine.have.add((f"received {kind} {message.cut}", micro_batch))


def _is_on_its_way(machine: Machine, kind: str, micro_batch: tuple[int, int]) -> bool:
    return any((kind, micro_batch) in waiting for waiting in machine.posted.values())


def _compute(machine: Machine, op: Op, micro_batch: tuple[int, int]) -> bool:
    """Whether its input is here."""
    first = machine.name.pp == 0
    last = machine.name.pp == machine.plan.mesh.pp - 1
    if op is not Op.W and _is_on_its_way(machine, "act" if op is Op.F else "grad", micro_batch):
        return False
    machine.done.append((op, micro_batch))
    if op is Op.F:
        if not first:
            machine.need(("input act", micro_batch))
        machine.make("output act", micro_batch)
    elif op is Op.W:
        machine.need(("output grad", micro_batch))
    else:
        machine.need(("output act", micro_batch))
        if not last:
            machine.need(("input grad", micro_batch))
        machine.make("output grad", micro_batch)
    return True


def _transfer(
    machine: Machine,
    machines: dict[GroupName, Machine],
    channels: dict[tuple[GroupName, GroupName], list[Message]],
    op: Op,
    micro_batch: tuple[int, int],
) -> bool:
    verb, kind = op.mnemonic.split("_")
    forward = (kind == "act") == (verb in ("send", "scatter"))
    peer = GroupName(machine.name.replica, machine.name.pp + (1 if forward else -1))
    if peer not in machines:
        raise RefusedError(f"{machine.name} has no {peer}")
    tp_here, tp_there = (_degree(machine.plan, name) for name in (machine.name, peer))
    if verb == "scatter":
        machine.need((f"output {kind}", micro_batch))
        if machine.plan.batch.tokens % max(tp_here, tp_there):
            raise RefusedError("unequal chunks")
        machine.make(f"chunks of {kind}", micro_batch)
        if (f"sent {kind}", micro_batch) in machine.have:
            raise RefusedError("scatter after send")
    elif verb == "send":
        machine.need((f"output {kind}", micro_batch))
        cut = (f"chunks of {kind}", micro_batch) in machine.have
        if not cut and tp_here != tp_there:
            raise RefusedError("whole tensor between unequal degrees")
        machine.make(f"sent {kind}", micro_batch)
        channels.setdefault((machine.name, peer), []).append(Message(kind, micro_batch, cut))
    elif verb == "recv":
        _used_later(machine, kind, micro_batch)
        machine.make(f"posted {kind}", micro_batch)
        machine.posted.setdefault(peer, []).append((kind, micro_batch))
    elif _is_on_its_way(machine, kind, micro_batch):
        return False
    else:
        machine.need((f"received {kind} True", micro_batch))
        _used_later(machine, kind, micro_batch)
        machine.have.discard(("received chunks of", micro_batch))
        machine.make(f"input {kind}", micro_batch)
    return True


def _degree(plan: Plan, name: GroupName) -> int:
    return next(len(group.ranks) for group in plan.groups if group.name == name)


def _used_later(machine: Machine, kind: str, micro_batch: tuple[int, int]) -> None:
    uses = (Op.F,) if kind == "act" else (Op.B, Op.BW)
    if any((op, micro_batch) in machine.done for op in uses):
        raise RefusedError("received after use")


def _meet(machine: Machine, machines: dict[GroupName, Machine], op: Op) -> bool:
    others = [m for m in machines.values() if op is Op.STEP or m.name.pp == machine.name.pp]
    if op is Op.REDUCE_GRADS:
        if machine.reduced:
            raise RefusedError("reduces twice")
        came = [m.reduced or _is_at(m, op) for m in others]
        machine.reduced = all(came)
        return machine.reduced
    if machine.stepped or not machine.reduced or machine.at != len(machine.body) - 1:
        raise RefusedError("step is misplaced")
    machine.stepped = all(m.stepped or _is_at(m, op) for m in others)
    return machine.stepped


def _is_at(machine: Machine, op: Op) -> bool:
    return machine.at < len(machine.body) and machine.body[machine.at].op is op


def peak_bytes(plan: Plan, name: GroupName, facts: StageFacts) -> int:
    """Peak of one stream with a ledger that is updated instruction by instruction.

    For direct transfers; buffers of posted sends are left out.
    """
    body = next(s.body for s in plan.streams if s.pp == name.pp and name.replica in s.replicas)
    live = peak = facts.state_bytes
    a, b = facts.activation_bytes, facts.released_by_b_bytes
    g, whole = facts.weight_input_grad_bytes, facts.boundary_bytes
    has_previous, has_next = name.pp > 0, name.pp < plan.mesh.pp - 1
    for instr in body:
        before, after = {
            Op.RECV_ACT: (whole, 0),
            Op.RECV_GRAD: (whole, 0),
            Op.F: (a, whole * has_previous),
            Op.B: (g, b + whole * has_next),
            Op.W: (0, a - b + g),
            Op.BW: (g, a + g + whole * has_next),
        }.get(instr.op, (0, 0))
        live += before
        peak = max(peak, live)
        live -= after
    return peak
