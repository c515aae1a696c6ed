"""The streams of a plan, one lane per TP group, with micro-batches, stages and peers absolute.

The verifier, the timeline and the picture all look at a plan this way.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from resihp.ir.kept import kept_by
from resihp.ir.model import Group, GroupName, Instr, LayerRange, MicroBatch, Op, Plan
from resihp.ir.placement import Placement, placement_of
from resihp.ir.statements import spell_instr

__all__ = [
    "BY_TRANSFER",
    "COMPUTE",
    "EDGES",
    "Edge",
    "Lane",
    "Meeting",
    "Task",
    "alike",
    "lanes_of",
    "name_of",
]

COMPUTE = (Op.F, Op.B, Op.W, Op.BW)


class Task(NamedTuple):
    """One micro-batch at one stage."""

    stage: int
    home: int
    number: int

    def at(self, stage: int) -> Task:
        """The same micro-batch at another stage."""
        return Task(stage, self.home, self.number)

    @property
    def micro_batch(self) -> MicroBatch:
        """Which one, whatever the stage."""
        return MicroBatch(self.home, self.number)


class Meeting(NamedTuple):
    """A rendezvous: `reduce_grads` of a stage, or `step` (stage -1) of all lanes."""

    op: Op
    stage: int


class Edge(NamedTuple):
    """The operations of one kind of transfer between neighbouring stages."""

    what: str
    produce: tuple[Op, ...]
    scatter: Op
    send: Op
    recv: Op
    gather: Op
    consume: tuple[Op, ...]
    stage_step: int
    """Receiver's stage minus sender's stage."""


EDGES = (
    Edge(
        "activation", (Op.F,), Op.SCATTER_ACT, Op.SEND_ACT, Op.RECV_ACT, Op.GATHER_ACT, (Op.F,), 1
    ),
    Edge(
        "gradient",
        (Op.B, Op.BW),
        Op.SCATTER_GRAD,
        Op.SEND_GRAD,
        Op.RECV_GRAD,
        Op.GATHER_GRAD,
        (Op.B, Op.BW),
        -1,
    ),
)
BY_TRANSFER = {
    op: edge for edge in EDGES for op in (edge.scatter, edge.send, edge.recv, edge.gather)
}
"""The edge of each send, receive, scatter and gather."""


class Lane:
    """What one TP group runs."""

    def __init__(self, group: Group, stream: int, plan: Plan, placement: Placement) -> None:
        self.name: GroupName = group.name
        self.group = group
        self.stream = stream
        """Index in `plan.streams`."""
        self.body: tuple[Instr, ...] = plan.streams[stream].body
        self.level = plan.level
        self.placement = placement
        self.stages: tuple[int, ...] = placement.stages.get(group.pp, ())
        """Stages that the group runs, ascending."""
        self.first: dict[tuple[Op, Task], int] = {}
        """Index of the first instruction of each kind for each task."""
        self.again: list[tuple[int, int]] = []
        """(index, index of the first) of every instruction that repeats an earlier one."""
        self.meets: dict[Meeting, int] = {}
        """Index of the first reduce_grads of each stage and of the first step."""
        self.paired: list[int] = []
        """Index of every instruction that is to be overlapped with the next, right or wrong."""
        self.is_unclear = False
        """Whether an instruction does not say which of the stages here it belongs to (RHP109)."""
        self.pairs: set[int] = set()
        """Index of the first instruction of each overlapped pair of compute instructions."""
        self.tasks: list[Task | None] = []
        """One per instruction; None without a micro-batch, and for numbers out of range."""
        self._far_ends: dict[int, tuple[GroupName, Task] | None] = {}
        self._look_up(plan)
        self._find_pairs()

    def _look_up(self, plan: Plan) -> None:
        sole = self.stages[0] if len(self.stages) == 1 else None
        num_micro_batches, num_homes = plan.batch.microbatches, plan.mesh.dp
        replica, pp = self.name
        for index, instr in enumerate(self.body):
            stage = sole if instr.stage is None else instr.stage
            task = None
            if stage is None or (stage != sole and not self.placement.is_at(stage, pp)):
                self.is_unclear = self.is_unclear or instr.op.has_stage
            elif instr.microbatch is not None:
                home = replica if instr.home is None else instr.home
                if instr.microbatch < num_micro_batches and home < num_homes:
                    task = Task(stage, home, instr.microbatch)
                    first = self.first.setdefault((instr.op, task), index)
                    if first != index:
                        self.again.append((index, first))
            self.tasks.append(task)
            if instr.paired:
                self.paired.append(index)
            if instr.op is Op.REDUCE_GRADS or instr.op is Op.STEP:
                meeting = self.meeting(index)
                if meeting is not None:
                    self.meets.setdefault(meeting, index)

    def _find_pairs(self) -> None:
        for index in self.paired:
            both = [instr for instr in self.body[index : index + 2] if instr.op.is_compute]
            if len(both) == 2 and index - 1 not in self.pairs:
                self.pairs.add(index)

    def meeting(self, index: int) -> Meeting | None:
        """The rendezvous that instruction `index` takes part in."""
        instr = self.body[index]
        if instr.op is Op.STEP:
            return Meeting(instr.op, -1)
        if instr.op is not Op.REDUCE_GRADS:
            return None
        stage = self.placement.stage_of(self.name.pp, instr)
        return None if stage is None else Meeting(instr.op, stage)

    def head_of(self, index: int) -> int:
        """The first of the overlapped pair that instruction `index` belongs to, or `index`."""
        return index - 1 if index - 1 in self.pairs else index

    def last_of(self, index: int) -> int:
        """The second of the overlapped pair that instruction `index` belongs to, or `index`."""
        return index + 1 if index in self.pairs else index

    def find(self, ops: tuple[Op, ...], task: Task) -> int | None:
        """Index of the first instruction of one of `ops` for `task`."""
        found = [self.first[op, task] for op in ops if (op, task) in self.first]
        return min(found, default=None)

    def use_of(self, edge: Edge, task: Task) -> int | None:
        """Index of the first instruction that needs what the receive of `edge` brings.

        That is the gather, or else the compute that consumes it; None where none follows.
        """
        recv = self.first.get((edge.recv, task))
        gather = self.first.get((edge.gather, task))
        uses = (gather, self.find(edge.consume, task))
        if recv is None:
            return None
        return min((use for use in uses if use is not None and use > recv), default=None)

    def peer(self, index: int) -> int:
        """The replica at the other end of the send or receive `index`."""
        peer = self.body[index].peer
        return self.name.replica if peer is None else peer

    def far_end(self, index: int) -> tuple[GroupName, Task] | None:
        """Where a send goes, or a receive comes from, as it is written, and the task there.

        The same for a scatter and a gather, but for the replica, which they do not say. None past
        the ends of the pipeline and for numbers out of range.
        """
        if index not in self._far_ends:
            self._far_ends[index] = self._find_far_end(index)
        return self._far_ends[index]

    def _find_far_end(self, index: int) -> tuple[GroupName, Task] | None:
        task, op = self.tasks[index], self.body[index].op
        edge = BY_TRANSFER[op]
        if task is None:
            return None
        step = edge.stage_step if op in (edge.scatter, edge.send) else -edge.stage_step
        stage = task.stage + step
        if not 0 <= stage < self.placement.num_stages:
            return None
        return GroupName(self.peer(index), self.placement.pp[stage]), task.at(stage)

    def text(self, index: int) -> str:
        """The instruction as it is written, in backquotes."""
        return f"`{spell_instr(self.body[index])}`"

    def text_of_pair(self, index: int) -> str:
        """The same, and at the first of an overlapped pair the whole pair."""
        if index not in self.pairs:
            return self.text(index)
        return f"{self.text(index)[:-1]} & {self.text(index + 1)[1:]}"

    def spell(self, op: Op, task: Task, peer: int | None = None) -> str:
        """How `op` for `task` is to be written here, in backquotes."""
        replica = self.name.replica
        instr = Instr(
            op,
            task.number,
            None if task.home == replica else task.home,
            task.stage if len(self.stages) > 1 else None,
            None if peer == replica else peer,
        )
        return f"`{spell_instr(instr)}`"


def lanes_of(plan: Plan, replicas: Collection[int] | None = None) -> dict[GroupName, Lane]:
    """The lane of every group that has a stream, by position and replica, position by position.

    Where a group or a stream is given twice the first one counts. `replicas` limits the lanes to
    some replicas.
    """
    groups, streams = _by_name(plan)
    placement = placement_of(plan)
    names = sorted(
        (name for name in groups if name in streams and (replicas is None or name[0] in replicas)),
        key=lambda name: (name.pp, name.replica),
    )
    return {name: Lane(groups[name], streams[name], plan, placement) for name in names}


def alike(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Replicas that do the same, by the first of them.

    Alike are replicas with the same layers, TP degrees and instructions at every position, that
    have nothing to do with others: they name no home and no peer, and no other replica names
    them. What holds for one of them holds for all; on a large healthy job that is one instead of
    hundreds.
    """
    groups, streams = _by_name(plan)
    held: dict[int, list[tuple[int, int, tuple[LayerRange, ...], int]]] = {}
    for name in sorted(groups):
        body = id(plan.streams[streams[name]].body) if name in streams else 0
        group = groups[name]
        held.setdefault(name.replica, []).append((name.pp, group.tp, group.layers, body))
    # A shared stream lacks the same micro-batches everywhere, and not all need be kept.
    keeps = bool(kept_by(plan))
    named: dict[int, set[int]] = {0: set()}
    """Replicas that each body names."""
    for stream in plan.streams:
        if id(stream.body) not in named:
            named[id(stream.body)] = _replicas_named(stream.body)
    visited = frozenset[int]().union(*named.values())
    classes: dict[object, list[int]] = {}
    for replica, kind in held.items():
        alone = keeps or replica in visited or any(named[body] for *_, body in kind)
        classes.setdefault(replica if alone else tuple(kind), []).append(replica)
    return {members[0]: tuple(members) for members in classes.values()}


def _replicas_named(body: tuple[Instr, ...]) -> set[int]:
    named = set(map(attrgetter("home"), body)) | set(map(attrgetter("peer"), body))
    return {replica for replica in named if replica is not None}


def _by_name(plan: Plan) -> tuple[dict[GroupName, Group], dict[GroupName, int]]:
    """The first group, and the index of the first stream, of each (replica, position)."""
    groups: dict[GroupName, Group] = {}
    for group in plan.groups:
        groups.setdefault(group.name, group)
    streams: dict[GroupName, int] = {}
    for index, stream in enumerate(plan.streams):
        for replica in stream.replicas:
            streams.setdefault(GroupName(replica, stream.pp), index)
    return groups, streams


def name_of(micro_batch: MicroBatch | Task, replica: int) -> str:
    """How the micro-batch is written in a stream of `replica`: `3` at home, `3@1` elsewhere."""
    number, home = micro_batch.number, micro_batch.home
    return str(number) if home == replica else f"{number}@{home}"
