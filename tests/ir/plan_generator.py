"""Random right plans over the whole language.

A layout is drawn (positions, stages in a loop, in V shape or anyhow, uneven layers, TP degrees,
replicas that lack a position), then who computes what, then an order: a greedy player takes any
work that is ready, again and again, and writes it down in the streams of those who do it. Since
one order of the whole job is behind the streams, every plan can run under the `edge` transport.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Level,
    Mesh,
    ModelShape,
    Op,
    Plan,
    Stream,
)

FAVOURS = (0.03, 0.3, 1.0, 3.0, 30.0)
"""How much the player likes a kind of work, drawn for every plan."""


class Limits(NamedTuple):
    """How large plans may be."""

    num_ranks: int = 24
    """Of all groups together."""
    dp: int = 3
    stages: int = 7
    microbatches: int = 4


LARGE = Limits()
EXECUTABLE = Limits(num_ranks=6, dp=2, stages=6)
"""Small enough to be run by processes of this machine."""


class MicroBatch(NamedTuple):
    home: int
    number: int


class Task(NamedTuple):
    """Something that the player can do. Transfers are named by the stage that uses the tensor."""

    op: Op
    stage: int
    micro_batch: MicroBatch | None = None


def generate(rng: random.Random, limits: Limits = LARGE) -> Plan:
    """A plan without findings."""
    while True:
        plan = _Draft(rng, limits).plan()
        if plan is None:
            continue
        cloned = _with_clones(plan, rng) if rng.random() < 0.2 else plan
        return cloned if len(cloned.active_ranks) <= limits.num_ranks else plan


def _with_clones(plan: Plan, rng: random.Random) -> Plan:
    """With new replicas that do what a replica does that keeps to itself; they share its streams.

    Where there is no such replica, the plan as it is.
    """
    replica = rng.randrange(plan.mesh.dp)
    mine = [group for group in plan.groups if group.replica == replica]
    bodies = [stream for stream in plan.streams if replica in stream.replicas]
    named: dict[bool, set[int | None]] = {False: set(), True: set()}
    """Replicas that occur in the streams of the others, and in its own."""
    for stream in plan.streams:
        for instr in stream.body:
            named[stream in bodies] |= {instr.home, instr.peer}
    if replica in named[False] or named[True] - {None, replica} or len(mine) < plan.mesh.pp:
        return plan
    clones = range(plan.mesh.dp, plan.mesh.dp + rng.randint(1, 2))
    mesh = msgspec.structs.replace(plan.mesh, dp=clones.stop)
    groups, ranks = list(plan.groups), list(range(plan.mesh.world, mesh.world))
    for clone in clones:
        for group in mine:
            members, ranks = tuple(ranks[: group.tp]), ranks[group.tp :]
            groups.append(msgspec.structs.replace(group, replica=clone, ranks=members))
    streams = tuple(
        msgspec.structs.replace(
            stream,
            replicas=(*stream.replicas, *clones),
            body=tuple(msgspec.structs.replace(i, home=None, peer=None) for i in stream.body),
        )
        if stream in bodies
        else stream
        for stream in plan.streams
    )
    return msgspec.structs.replace(
        plan, mesh=mesh, groups=tuple(groups), streams=streams, standby=(*plan.standby, *ranks)
    )


def as_schedule(plan: Plan) -> Plan:
    """Only the computations of `plan`."""
    streams = tuple(
        msgspec.structs.replace(stream, body=tuple(i for i in stream.body if i.op.is_compute))
        for stream in plan.streams
    )
    return msgspec.structs.replace(plan, level=Level.SCHEDULE, streams=streams)


class _Draft:
    """Everything that is drawn for one plan."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        self.rng = rng
        self.pp, self.dp = rng.choice((1, 2, 2, 3)), rng.choice(range(1, limits.dp + 1))
        self.tp = rng.choice((1, 1, 2, 4))
        self.positions = _placement(rng, self.pp, limits.stages)
        self.layers = [rng.choice((1, 1, 2, 3)) for _ in self.positions]
        self.microbatches = rng.randint(1, limits.microbatches)
        self.alike = self.dp > 1 and rng.random() < 0.15
        """Whether all replicas do the same and share their streams."""
        self.degrees = self._degrees(limits)

    def _degrees(self, limits: Limits) -> dict[GroupName, int]:
        """TP degree of every group there is; empty where they would need too many ranks."""
        rng = self.rng
        names = [GroupName(replica, pp) for replica in range(self.dp) for pp in range(self.pp)]
        degrees = {
            name: rng.choice([d for d in (1, 1, 2, 4) if d <= self.tp] + [self.tp])
            for name in names
        }
        if self.alike:
            degrees = {name: degrees[GroupName(0, name.pp)] for name in names}
        elif self.dp > 1 and rng.random() < 0.4:
            for name in rng.sample(names, rng.randint(1, len(names) - 1)):
                if any(other.pp == name.pp != other for other in degrees if other != name):
                    del degrees[name]
        return degrees if sum(degrees.values()) <= limits.num_ranks else {}

    def plan(self) -> Plan | None:
        if not self.degrees:
            return None
        bodies = _Player(self, self._owners()).bodies
        streams = [
            Stream(replicas=(name.replica,), pp=name.pp, body=tuple(self._spelled(name, body)))
            for name, body in bodies.items()
        ]
        if self.alike:
            streams = [
                msgspec.structs.replace(stream, replicas=tuple(range(self.dp)))
                for stream in streams
            ]
        self.rng.shuffle(streams)
        groups, idle = self._groups()
        num_lost = self.rng.randint(0, len(idle))
        return Plan(
            model=ModelShape(
                name="tiny", layers=sum(self.layers), hidden=8, heads=4, kv_heads=4, ffn=8, vocab=16
            ),
            mesh=Mesh(tp=self.tp, pp=self.pp, dp=self.dp),
            batch=Batch(microbatches=self.microbatches, tokens=self.rng.choice((4, 8))),
            groups=groups,
            streams=tuple(streams),
            standby=tuple(sorted(idle[num_lost:])),
            lost=tuple(sorted(idle[:num_lost])),
        )

    def _groups(self) -> tuple[tuple[Group, ...], list[int]]:
        """The groups, and the ranks that are in none."""
        ranks = list(range(self.tp * self.pp * self.dp))
        if self.rng.random() < 0.5:
            self.rng.shuffle(ranks)
        ends = [sum(self.layers[: stage + 1]) for stage in range(len(self.layers))]
        held = [LayerRange(end - n, end - 1) for end, n in zip(ends, self.layers, strict=True)]
        groups: list[Group] = []
        for name, degree in self.degrees.items():
            members, ranks = ranks[:degree], ranks[degree:]
            layers = tuple(held[s] for s, pp in enumerate(self.positions) if pp == name.pp)
            groups.append(
                Group(replica=name.replica, pp=name.pp, ranks=tuple(members), layers=layers)
            )
        return tuple(groups), ranks

    def _owners(self) -> dict[tuple[int, MicroBatch], int]:
        """The replica that computes each stage of each micro-batch."""
        rng = self.rng
        migrating = 0.0 if self.alike else rng.choice((0.0, 0.0, 0.1, 0.5))
        together = rng.random() < 0.5
        """A micro-batch that finds no group at home goes to one replica with all its stages."""
        owners: dict[tuple[int, MicroBatch], int] = {}
        for home in range(1 if self.alike else self.dp):
            for number in range(self.microbatches):
                favourite = rng.randrange(self.dp)
                for stage, pp in enumerate(self.positions):
                    holders = [name.replica for name in self.degrees if name.pp == pp]
                    owner = home
                    if home not in holders or rng.random() < migrating:
                        owner = rng.choice(holders)
                        if together and favourite in holders:
                            owner = favourite
                    owners[stage, MicroBatch(home, number)] = owner
        return owners

    def _spelled(self, name: GroupName, body: Sequence[Instr]) -> Iterator[Instr]:
        """What may be left out is written out now and then."""
        for instr in body:
            changes: dict[str, int | None] = {}
            if not self.alike:
                spelled = self.rng.random() < 0.1
                for field, value in (("home", instr.home), ("peer", instr.peer)):
                    if value == name.replica and not spelled:
                        changes[field] = None
            if self.positions.count(name.pp) == 1 and self.rng.random() < 0.9:
                changes["stage"] = None
            yield msgspec.structs.replace(instr, **changes)


def _placement(rng: random.Random, pp: int, max_stages: int) -> list[int]:
    """The position of every stage."""
    shape = rng.choice(("plain", "loop", "loop", "V", "V", "any", "any"))
    if shape == "any":
        stages = [*range(pp), *(rng.randrange(pp) for _ in range(rng.randint(0, 2 * pp)))]
        rng.shuffle(stages)
    else:
        line = list(range(pp))
        turns = 1 if shape == "plain" else rng.choice((2, 2, 3))
        stages = [
            position
            for turn in range(turns)
            for position in (line[::-1] if shape == "V" and turn % 2 else line)
        ]
    return stages if len(stages) <= max_stages else list(range(pp))


class _Player:
    """Takes ready work in a random order and writes the streams."""

    def __init__(self, draft: _Draft, owners: dict[tuple[int, MicroBatch], int]) -> None:
        self.draft, self.owners, self.rng = draft, owners, draft.rng
        self.bodies: dict[GroupName, list[Instr]] = {
            name: [] for name in draft.degrees if not draft.alike or name.replica == 0
        }
        self.favour = {op: self.rng.choice(FAVOURS) for op in Op}
        self.pairing = self.rng.choice((0.0, 0.0, 0.2, 0.6))
        self.cutting = self.rng.choice((0.0, 0.0, 0.3, 1.0))
        self.splitting = self.rng.choice((0.0, 0.5, 1.0))
        self.channels: dict[tuple[GroupName, GroupName], list[Task]] = {}
        """Receives whose tensors are sent, per channel in the order of the sends."""
        self.waits_for: dict[Task, int] = {}
        self.unlocks: dict[Task, list[Task]] = {}
        self.ready: list[Task] = []
        self._plan_work()
        self.ready = [task for task, count in self.waits_for.items() if not count]
        while self.ready:
            self._take(self._choose(self.ready))
        assert not any(self.waits_for.values()), "the player is stuck"
        for name, body in self.bodies.items():
            body.append(Instr(Op.STEP))
            self._hoist_receives(body)
            self._shard_params(name, body)

    def _after(self, task: Task, *before: Task) -> Task:
        self.waits_for[task] = self.waits_for.get(task, 0) + len(before)
        for other in before:
            self.unlocks.setdefault(other, []).append(task)
        return task

    def _plan_work(self) -> None:
        last = len(self.draft.positions) - 1
        work: list[list[Task]] = [[] for _ in self.draft.positions]
        for stage, micro_batch in self.owners:
            forward = self._after(Task(Op.F, stage, micro_batch))
            if self.rng.random() < self.splitting:
                backward = Task(Op.B, stage, micro_batch)
                work[stage].append(self._after(Task(Op.W, stage, micro_batch), backward))
            else:
                backward = Task(Op.BW, stage, micro_batch)
                work[stage].append(backward)
            self._after(backward, forward)
        for stage, micro_batch in self.owners:
            if stage < last:
                self._cross(Task(Op.F, stage, micro_batch), (Task(Op.F, stage + 1, micro_batch),))
                for op in (Op.B, Op.BW):
                    uses = Task(Op.B, stage, micro_batch), Task(Op.BW, stage, micro_batch)
                    self._cross(Task(op, stage + 1, micro_batch), uses)
        for task in list(self.waits_for):
            if task.op is Op.SEND_ACT:
                work[task.stage - 1].append(task)
            elif task.op is Op.SEND_GRAD:
                work[task.stage + 1].append(task)
        for stage, tasks in enumerate(work):
            self._after(Task(Op.REDUCE_GRADS, stage), *tasks)

    def _cross(self, maker: Task, uses: Sequence[Task]) -> None:
        """What carries a tensor from the task that makes it to the one that uses it."""
        use = next(task for task in uses if task in self.waits_for)
        if maker not in self.waits_for:
            return
        here, there = self._name(maker), self._name(use)
        if here == there:
            self._after(use, maker)
            return
        degrees = self.draft.degrees[here], self.draft.degrees[there]
        cut = degrees[0] != degrees[1] or self.rng.random() < self.cutting
        kind = "ACT" if maker.op is Op.F else "GRAD"
        scatter, send, recv, gather = (
            Task(Op[f"{verb}_{kind}"], use.stage, use.micro_batch)
            for verb in ("SCATTER", "SEND", "RECV", "GATHER")
        )
        self._after(send, maker)
        self._after(recv)
        self.waits_for[recv] = 1  # its turn in the channel
        self._after(use, recv)
        if cut:
            self._after(send, self._after(scatter, maker))
            self._after(use, self._after(gather, recv))

    def _name(self, task: Task) -> GroupName:
        """The group that computes a task."""
        assert task.micro_batch is not None
        owner = self.owners[task.stage, task.micro_batch]
        return GroupName(owner, self.draft.positions[task.stage])

    def _choose(self, tasks: Sequence[Task]) -> Task:
        return self.rng.choices(tasks, [self.favour[task.op] for task in tasks])[0]

    def _take(self, task: Task) -> None:
        pair = task.op.is_compute and self.rng.random() < self.pairing
        partners = [
            other
            for other in self.ready
            if pair and other.op.is_compute and other[1:] != task[1:]
            if self._name(other) == self._name(task)
        ]
        self._write(task, paired=bool(partners))
        if partners:
            partner = self._choose(partners)
            self._write(partner)
            self._finish(partner)
        self._finish(task)

    def _finish(self, task: Task) -> None:
        self.ready.remove(task)
        for other in self.unlocks.get(task, ()):
            self._free(other)
        if not task.op.is_transfer:
            return
        sender, receiver = self._ends(task)
        channel = self.channels.setdefault((sender, receiver), [])
        if task.op in (Op.SEND_ACT, Op.SEND_GRAD):
            recv = Op.RECV_ACT if task.op is Op.SEND_ACT else Op.RECV_GRAD
            channel.append(task._replace(op=recv))
            freed = channel[0] if len(channel) == 1 else None
        else:
            channel.pop(0)
            freed = channel[0] if channel else None
        if freed is not None:
            self._free(freed)

    def _free(self, task: Task) -> None:
        self.waits_for[task] -= 1
        if not self.waits_for[task]:
            self.ready.append(task)

    def _ends(self, task: Task) -> tuple[GroupName, GroupName]:
        """Sender and receiver of the tensor of a transfer, scatter or gather."""
        is_act = task.op in (Op.SCATTER_ACT, Op.SEND_ACT, Op.RECV_ACT, Op.GATHER_ACT)
        maker = task._replace(stage=task.stage + (-1 if is_act else 1))
        return self._name(maker), self._name(task)

    def _write(self, task: Task, *, paired: bool = False) -> None:
        """Append the instruction to the streams of those who run it."""
        op, stage, micro_batch = task
        if micro_batch is None:
            for name, body in self.bodies.items():
                if name.pp == self.draft.positions[stage]:
                    body.append(Instr(op, stage=stage))
            return
        home = None if self.draft.alike else micro_batch.home
        if op.is_compute:
            instr = Instr(op, micro_batch.number, home, stage, None, paired)
            self.bodies[self._name(task)].append(instr)
            return
        sender, receiver = self._ends(task)
        away = op in (Op.SCATTER_ACT, Op.SEND_ACT, Op.SCATTER_GRAD, Op.SEND_GRAD)
        if away:
            stage += -1 if op in (Op.SCATTER_ACT, Op.SEND_ACT) else 1
        here, there = (sender, receiver) if away else (receiver, sender)
        peer = there.replica if op.is_transfer and not self.draft.alike else None
        self.bodies[here].append(Instr(op, micro_batch.number, home, stage, peer))

    def _hoist_receives(self, body: list[Instr]) -> None:
        """Post some receives earlier, each channel in the same order as before."""
        chance = self.rng.choice((0.0, 0.0, 0.2, 0.8))
        for at, instr in enumerate(body):
            if instr.op not in (Op.RECV_ACT, Op.RECV_GRAD) or self.rng.random() >= chance:
                continue
            first = max((i + 1 for i in range(at) if self._same_channel(body[i], instr)), default=0)
            to = self.rng.randint(first, at)
            if to == 0 or not body[to - 1].paired:
                body.insert(to, body.pop(at))

    def _same_channel(self, one: Instr, other: Instr) -> bool:
        def source(instr: Instr) -> tuple[int | None, int]:
            assert instr.stage is not None
            maker = instr.stage + (-1 if instr.op is Op.RECV_ACT else 1)
            return instr.peer, self.draft.positions[maker]

        return one.op in (Op.RECV_ACT, Op.RECV_GRAD) and source(one) == source(other)

    def _shard_params(self, name: GroupName, body: list[Instr]) -> None:
        """Gather and free the parameters of some stages around runs of their work."""
        for stage, pp in enumerate(self.draft.positions):
            if pp != name.pp or self.rng.random() >= 0.2:
                continue
            is_work: Callable[[Instr], bool] = lambda i, s=stage: i.op.is_compute and i.stage == s  # noqa: E731
            marked: list[Instr] = []
            is_open, rest = False, sum(map(is_work, body))
            for at, instr in enumerate(body):
                inside = at > 0 and body[at - 1].paired
                if not is_open and not inside and rest and self._opens(body[at : at + 2], is_work):
                    marked.append(Instr(Op.GATHER_PARAMS, stage=stage))
                    is_open = True
                marked.append(instr)
                rest -= is_work(instr)
                if is_open and not instr.paired and (not rest or self.rng.random() < 0.1):
                    marked.append(Instr(Op.FREE_PARAMS, stage=stage))
                    is_open = False
            body[:] = marked

    def _opens(self, ahead: Sequence[Instr], is_work: Callable[[Instr], bool]) -> bool:
        """Whether parameters must be gathered now, or chance wants them."""
        unit = ahead[: 2 if ahead[0].paired else 1]
        return any(map(is_work, unit)) or self.rng.random() < 0.1
