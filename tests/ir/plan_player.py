"""A greedy player: takes work that is ready in a random order and writes the streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from resihp.ir.model import GroupName, Instr, Op

if TYPE_CHECKING:
    from plan_generator import Draft

FAVOURS = (0.03, 0.3, 1.0, 3.0, 30.0)
"""How much the player likes a kind of work, drawn for every plan."""


class MicroBatch(NamedTuple):
    home: int
    number: int


class Task(NamedTuple):
    """Something that the player can do. Transfers are named by the stage that uses the tensor."""

    op: Op
    stage: int
    micro_batch: MicroBatch | None = None


class Player:
    """Takes ready work in a random order and writes the streams."""

    def __init__(self, draft: Draft, owners: dict[tuple[int, MicroBatch], int]) -> None:
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
