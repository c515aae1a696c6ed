"""A slow, obvious verifier: a little machine that runs a plan and refuses what is wrong.

Members of a group run the same stream, so one machine per group is enough. A channel is a list of
messages from one group to another, of all kinds and stages; the first receive that is posted takes
its head, whatever that is, and a wrong tensor is found where it is used. Nothing waits but what
needs a tensor, which is the `edge` transport; `transport_oracle` has the others. Of a schedule,
which has no transfers, only the order of the computations is run.

Written from the definition of the language alone, without a look at how `resihp.ir.verify` does it.
"""

from __future__ import annotations

from typing import NamedTuple

from resihp.ir.facts import StageFacts
from resihp.ir.model import Group, GroupName, Instr, Level, Op, Plan

PARAMS = (Op.GATHER_PARAMS, Op.FREE_PARAMS)
USES = {"act": (Op.F,), "grad": (Op.B, Op.BW)}


class RefusedError(Exception):
    """The plan cannot run, or computes something wrong."""


class MicroBatch(NamedTuple):
    home: int
    number: int


class Tensor(NamedTuple):
    """What crosses from one stage to the next or the previous one, named by who uses it."""

    kind: str
    stage: int
    micro_batch: MicroBatch


class Message(NamedTuple):
    tensor: Tensor
    is_cut: bool


class Work(NamedTuple):
    """An instruction with everything written out."""

    op: Op
    stage: int
    micro_batch: MicroBatch
    peer: int


class Machine:
    """One group with what it holds."""

    def __init__(self, plan: Plan, group: Group, body: tuple[Instr, ...]) -> None:
        self.plan, self.group, self.name, self.body = plan, group, group.name, body
        self.stages = stages_of(plan)[group.pp]
        self.at = 0
        self.done: list[tuple[Op, int, MicroBatch]] = []
        self.made: set[Tensor] = set()
        self.scattered: set[Tensor] = set()
        self.sent: set[Tensor] = set()
        self.posted: dict[GroupName, list[Tensor]] = {}
        """Receives that wait, by peer."""
        self.received: dict[Tensor, Message] = {}
        """What the receive of a tensor took from its channel, until it is used."""
        self.joined: dict[Tensor, Tensor] = {}
        """What the gather of a tensor made of it, until it is used."""
        self.ever: set[tuple[str, Tensor]] = set()
        self.reduced: set[int] = set()
        self.stepped = False
        self.gathered_params: set[int] = set()
        self.sharded = {work_stage(self, i) for i in body if i.op in PARAMS}
        """Stages whose parameters the stream gathers and frees."""

    def refuse(self, why: str) -> RefusedError:
        return RefusedError(f"{self.name} at {self.at}: {why}")

    def once(self, what: str, tensor: Tensor) -> None:
        if (what, tensor) in self.ever:
            raise self.refuse(f"{what} twice: {tensor}")
        self.ever.add((what, tensor))


class World:
    """All machines, and what is on its way between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        _check_layers(plan)
        self.positions = {s: pp for pp, stages in stages_of(plan).items() for s in stages}
        self.num_stages = len(self.positions)
        groups = {group.name: group for group in plan.groups}
        bodies = {GroupName(r, s.pp): s.body for s in plan.streams for r in s.replicas}
        if groups.keys() != bodies.keys():
            raise RefusedError("groups and streams do not belong together")
        self.machines = {name: Machine(plan, groups[name], bodies[name]) for name in groups}
        self.channels: dict[tuple[GroupName, GroupName], list[Message]] = {}

    def deliver(self, machine: Machine) -> None:
        """Give what has arrived to the receives that are posted, in order."""
        for peer, waiting in machine.posted.items():
            queue = self.channels.get((peer, machine.name), [])
            while queue and waiting:
                machine.received[waiting.pop(0)] = queue.pop(0)


def _check_layers(plan: Plan) -> None:
    """Every layer once, at one position."""
    held = {group.pp: group.layers for group in plan.groups}
    if any(group.layers != held[group.pp] for group in plan.groups):
        raise RefusedError("groups of a position hold different layers")
    layers = sorted(n for ranges in held.values() for r in ranges for n in range(r[0], r[1] + 1))
    if layers != list(range(plan.model.layers)):
        raise RefusedError("not every layer once")


def stages_of(plan: Plan) -> dict[int, list[int]]:
    """The stages of every position: ranges of layers are numbered through the model."""
    ranges = sorted({(layers.first, group.pp) for group in plan.groups for layers in group.layers})
    return {
        group.pp: [stage for stage, (_, pp) in enumerate(ranges) if pp == group.pp]
        for group in plan.groups
    }


def run(plan: Plan) -> None:
    """Run `plan` to the end; raise `RefusedError` where it fails, hangs or leaves work undone."""
    world = World(plan)
    moved = True
    while moved:
        moved = False
        for machine in world.machines.values():
            while machine.at < len(machine.body) and (num_done := _step(world, machine)):
                machine.at += num_done
                moved = True
            world.deliver(machine)
    for machine in world.machines.values():
        if machine.at < len(machine.body):
            raise machine.refuse("hangs")
        if plan.level is Level.PLAN:
            _nothing_left(machine)
    if any(world.channels.values()):
        raise RefusedError("messages are left over")
    _all_done(world)


def _nothing_left(machine: Machine) -> None:
    if machine.reduced != set(machine.stages) or not machine.stepped:
        raise machine.refuse("never reduced or stepped")
    if any(machine.posted.values()) or machine.received or machine.joined:
        raise machine.refuse("receives what it does not use")
    if machine.scattered - machine.sent:
        raise machine.refuse("scatters what it does not send")
    if machine.gathered_params:
        raise machine.refuse("keeps gathered parameters")


def _all_done(world: World) -> None:
    done = [entry for machine in world.machines.values() for entry in machine.done]
    for stage in range(world.num_stages):
        for home in range(world.plan.mesh.dp):
            for number in range(world.plan.batch.microbatches):
                micro_batch = MicroBatch(home, number)
                ops = sorted(op for op, *what in done if what == [stage, micro_batch])
                if ops not in ([Op.F, Op.B, Op.W], [Op.F, Op.BW]):
                    raise RefusedError(f"stage {stage} ran {ops} of {number}@{home}")


def work_stage(machine: Machine, instr: Instr) -> int:
    """The stage of an instruction that has one."""
    if instr.stage is None and len(machine.stages) == 1:
        return machine.stages[0]
    if instr.stage not in machine.stages:
        raise machine.refuse("no such stage here")
    return instr.stage


def _work(machine: Machine, instr: Instr) -> Work:
    plan, replica = machine.plan, machine.name.replica
    stage = work_stage(machine, instr)
    home = replica if instr.home is None else instr.home
    assert instr.microbatch is not None
    if home >= plan.mesh.dp or instr.microbatch >= plan.batch.microbatches:
        raise machine.refuse("no such micro-batch")
    peer = replica if instr.peer is None else instr.peer
    return Work(instr.op, stage, MicroBatch(home, instr.microbatch), peer)


def _step(world: World, machine: Machine) -> int:
    """How many instructions could run: none, one, or both of a pair."""
    world.deliver(machine)
    instr = machine.body[machine.at]
    if world.plan.level is Level.SCHEDULE and not instr.op.is_compute:
        raise machine.refuse("not in a schedule")
    if instr.paired:
        return 2 * _compute(world, machine, _pair(machine))
    if instr.op is Op.STEP:
        return _meet_at_step(world, machine)
    if instr.op is Op.REDUCE_GRADS:
        return _reduce(world, machine, work_stage(machine, instr))
    if instr.op in PARAMS:
        return _params(machine, instr.op, work_stage(machine, instr))
    work = _work(machine, instr)
    if work.stage in machine.reduced:
        raise machine.refuse("work of a stage after its reduce_grads")
    if instr.op.is_compute:
        return _compute(world, machine, (work,))
    return _transfer(world, machine, work)


def _pair(machine: Machine) -> tuple[Work, Work]:
    both = machine.body[machine.at : machine.at + 2]
    if len(both) < 2 or both[1].paired or not all(instr.op.is_compute for instr in both):
        raise machine.refuse("not a pair")
    one, other = (_work(machine, instr) for instr in both)
    if {one.stage, other.stage} & machine.reduced:
        raise machine.refuse("work of a stage after its reduce_grads")
    if one[1:3] == other[1:3]:
        raise machine.refuse("a pair of the same micro-batch and stage")
    return one, other


def _compute(world: World, machine: Machine, works: tuple[Work, ...]) -> bool:
    """Whether the inputs of all were there, so that all ran; none of them sees what others make."""
    ready = [_is_ready(world, machine, work) for work in works]
    if not all(ready):
        return False
    for work in works:
        machine.received.pop(_input(work), None)
        machine.joined.pop(_input(work), None)
    for op, stage, micro_batch, _ in works:
        machine.done.append((op, stage, micro_batch))
        if op is not Op.W:
            output = (
                Tensor("act", stage + 1, micro_batch)
                if op is Op.F
                else Tensor("grad", stage - 1, micro_batch)
            )
            machine.once("made", output)
            machine.made.add(output)
    return True


def _input(work: Work) -> Tensor:
    return Tensor("act" if work.op is Op.F else "grad", work.stage, work.micro_batch)


def _is_ready(world: World, machine: Machine, work: Work) -> bool:
    """Whether all that `work` uses is here; refuses what is not and will not be."""
    op, stage, micro_batch, _ = work
    if stage in machine.sharded and stage not in machine.gathered_params:
        raise machine.refuse("parameters are not gathered")
    before = {Op.F: None, Op.B: Op.F, Op.BW: Op.F, Op.W: Op.B}[op]
    if before is not None and (before, stage, micro_batch) not in machine.done:
        raise machine.refuse(f"{op.name} before {before.name}")
    if op is Op.W or stage == (0 if op is Op.F else world.num_stages - 1):
        return True
    return _has(world, machine, _input(work))


def _has(world: World, machine: Machine, tensor: Tensor) -> bool:
    """Whether the machine has the tensor; False if it is on its way."""
    if world.plan.level is Level.SCHEDULE:
        return any(tensor in other.made for other in world.machines.values())
    if any(tensor in waiting for waiting in machine.posted.values()):
        return False
    if tensor in machine.joined:
        found = machine.joined[tensor]
    elif tensor in machine.received:
        found, is_cut = machine.received[tensor]
        if is_cut:
            raise machine.refuse(f"chunks of {tensor} are not joined")
    elif tensor in machine.made:
        found = tensor
    else:
        raise machine.refuse(f"no {tensor}")
    if found != tensor:
        raise machine.refuse(f"{found} is taken for {tensor}")
    return True


def _transfer(world: World, machine: Machine, work: Work) -> bool:
    """Whether it could run: all but a gather do at once."""
    verb, kind = work.op.mnemonic.split("_")
    away = verb in ("scatter", "send")
    step = (1 if kind == "act" else -1) * (1 if away else -1)
    peer_stage = work.stage + step
    tensor = Tensor(kind, peer_stage if away else work.stage, work.micro_batch)
    if not 0 <= peer_stage < world.num_stages:
        raise machine.refuse("past the end of the pipeline")
    if away and tensor not in machine.made:
        raise machine.refuse(f"{verb} of {tensor}, which is not made here yet")
    if not away and any((op, *tensor[1:]) in machine.done for op in USES[kind]):
        raise machine.refuse(f"{verb} of {tensor} after its use")
    machine.once(verb, tensor)
    if verb == "scatter":
        if tensor in machine.sent:
            raise machine.refuse(f"scatter of {tensor} after its send")
        machine.scattered.add(tensor)
    elif verb == "gather":
        return _gather(machine, tensor)
    else:
        peer = world.machines.get(GroupName(work.peer, world.positions[peer_stage]))
        if peer is None or peer is machine:
            raise machine.refuse("no such peer")
        if verb == "send":
            _send(world, machine, peer, tensor)
        else:
            machine.posted.setdefault(peer.name, []).append(tensor)
    return True


def _send(world: World, machine: Machine, peer: Machine, tensor: Tensor) -> None:
    is_cut = tensor in machine.scattered
    if not is_cut and machine.group.tp != peer.group.tp:
        raise machine.refuse("a whole tensor between unequal degrees")
    if is_cut and world.plan.batch.tokens % max(machine.group.tp, peer.group.tp):
        raise machine.refuse("unequal chunks")
    machine.sent.add(tensor)
    world.channels.setdefault((machine.name, peer.name), []).append(Message(tensor, is_cut))


def _gather(machine: Machine, tensor: Tensor) -> bool:
    if any(tensor in waiting for waiting in machine.posted.values()):
        machine.ever.discard(("gather", tensor))
        return False
    if tensor not in machine.received:
        raise machine.refuse(f"gather of {tensor}, which is not received")
    found, is_cut = machine.received.pop(tensor)
    if not is_cut:
        raise machine.refuse(f"gather of {tensor}, which came whole")
    machine.joined[tensor] = found
    return True


def _params(machine: Machine, op: Op, stage: int) -> bool:
    if (op is Op.GATHER_PARAMS) == (stage in machine.gathered_params):
        raise machine.refuse(f"{op.mnemonic} twice")
    machine.gathered_params ^= {stage}
    return True


def _reduce(world: World, machine: Machine, stage: int) -> bool:
    """Whether all who hold the stage have come."""
    if stage in machine.reduced:
        raise machine.refuse("reduces twice")
    others = [m for m in world.machines.values() if stage in m.stages and m is not machine]
    if not all(stage in m.reduced or _is_at(m, Op.REDUCE_GRADS, stage) for m in others):
        return False
    machine.reduced.add(stage)
    return True


def _meet_at_step(world: World, machine: Machine) -> bool:
    """Whether all have come."""
    if machine.at != len(machine.body) - 1:
        raise machine.refuse("step is not last")
    machine.stepped = all(m.stepped or _is_at(m, Op.STEP, None) for m in world.machines.values())
    return machine.stepped


def _is_at(machine: Machine, op: Op, stage: int | None) -> bool:
    if machine.at == len(machine.body):
        return False
    instr = machine.body[machine.at]
    return instr.op is op and (stage is None or work_stage(machine, instr) == stage)


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
