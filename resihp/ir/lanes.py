"""The streams of a plan, one lane per (replica, stage), with micro-batches named absolutely.

The verifier, the timeline and the picture all look at a plan this way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from resihp.ir.model import Group, GroupName, Instr, LayerRange, Op, Plan

__all__ = ["COMPUTE", "EDGES", "Edge", "Lane", "MicroBatch", "alike", "lanes_of", "name_of"]

COMPUTE = (Op.F, Op.B, Op.W, Op.BW)


class MicroBatch(NamedTuple):
    """A micro-batch by its home replica and its number there."""

    home: int
    number: int


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


class Lane:
    """What one TP group runs."""

    def __init__(self, group: Group, stream: int, plan: Plan) -> None:
        self.name: GroupName = group.name
        self.group = group
        self.stream = stream
        """Index in `plan.streams`."""
        self.body: tuple[Instr, ...] = plan.streams[stream].body
        self.first: dict[tuple[Op, MicroBatch], int] = {}
        """Index of the first instruction of each kind for each micro-batch in range."""
        self.again: list[tuple[int, int]] = []
        """(index, index of the first) of every instruction that repeats an earlier one."""
        self.meets: dict[Op, int] = {}
        """Index of the first reduce_grads and of the first step."""
        self.micro_batches: list[MicroBatch | None] = []
        """One per instruction; None for reduce_grads, step and micro-batches out of range."""
        for index, instr in enumerate(self.body):
            micro_batch = self._resolve(instr, plan)
            self.micro_batches.append(micro_batch)
            if micro_batch is not None:
                first = self.first.setdefault((instr.op, micro_batch), index)
                if first != index:
                    self.again.append((index, first))
            elif instr.op >= Op.REDUCE_GRADS:
                self.meets.setdefault(instr.op, index)

    def _resolve(self, instr: Instr, plan: Plan) -> MicroBatch | None:
        if instr.microbatch is None:
            return None
        home = self.name.replica if instr.home is None else instr.home
        if instr.microbatch >= plan.batch.microbatches or home >= plan.mesh.dp:
            return None
        return MicroBatch(home, instr.microbatch)

    def find(self, ops: tuple[Op, ...], micro_batch: MicroBatch) -> int | None:
        """Index of the first instruction of one of `ops` for `micro_batch`."""
        found = [self.first[op, micro_batch] for op in ops if (op, micro_batch) in self.first]
        return min(found, default=None)

    def use_of(self, edge: Edge, micro_batch: MicroBatch) -> int | None:
        """Index of the first instruction that needs what the receive of `edge` brings.

        That is the gather, or else the compute that consumes it; None where none follows.
        """
        recv = self.first.get((edge.recv, micro_batch))
        gather = self.first.get((edge.gather, micro_batch))
        uses = (gather, self.find(edge.consume, micro_batch))
        if recv is None:
            return None
        return min((use for use in uses if use is not None and use > recv), default=None)


def lanes_of(plan: Plan, replicas: Collection[int] | None = None) -> dict[GroupName, Lane]:
    """The lane of every group that has a stream, by (replica, stage), stage by stage.

    Where a group or a stream is given twice the first one counts. `replicas` limits the lanes to
    some replicas.
    """
    groups, streams = _by_name(plan)
    names = sorted(
        (name for name in groups if name in streams and (replicas is None or name[0] in replicas)),
        key=lambda name: (name.pp, name.replica),
    )
    return {name: Lane(groups[name], streams[name], plan) for name in names}


def alike(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Replicas that do the same, by the first of them.

    Alike are replicas with the same layers, TP degrees and instructions at every stage, that run
    nobody else's micro-batches and whose own are run by nobody else. What holds for one of them
    holds for all; on a large healthy job that is one instead of hundreds.
    """
    groups, streams = _by_name(plan)
    stages: dict[int, list[tuple[int, int, tuple[LayerRange, ...], int]]] = {}
    for name in sorted(groups):
        body = id(plan.streams[streams[name]].body) if name in streams else 0
        group = groups[name]
        stages.setdefault(name.replica, []).append((name.pp, group.tp, group.layers, body))
    foreign = {
        id(body): {instr.home for instr in body if instr.home is not None}
        for body in {id(stream.body): stream.body for stream in plan.streams}.values()
    }
    foreign[0] = set()
    visited = frozenset[int]().union(*foreign.values())
    classes: dict[object, list[int]] = {}
    for replica, held in stages.items():
        alone = replica in visited or any(foreign[body] for *_, body in held)
        classes.setdefault(replica if alone else tuple(held), []).append(replica)
    return {members[0]: tuple(members) for members in classes.values()}


def _by_name(plan: Plan) -> tuple[dict[GroupName, Group], dict[GroupName, int]]:
    """The first group, and the index of the first stream, of each (replica, stage)."""
    groups: dict[GroupName, Group] = {}
    for group in plan.groups:
        groups.setdefault(group.name, group)
    streams: dict[GroupName, int] = {}
    for index, stream in enumerate(plan.streams):
        for replica in stream.replicas:
            streams.setdefault(GroupName(replica, stream.pp), index)
    return groups, streams


def name_of(micro_batch: MicroBatch, replica: int) -> str:
    """How the micro-batch is written in a stream of `replica`: `3` at home, `3@1` elsewhere."""
    home, number = micro_batch
    return str(number) if home == replica else f"{number}@{home}"
