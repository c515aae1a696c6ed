"""Whole plans of any size for the benchmarks: made by playing greedy groups against time.

Every group takes, of what it could compute, first the oldest backward, then a forward while it
holds few, then a weight gradient. A tensor is sent as soon as it is made and its receive is posted
at the same moment, so the order of messages agrees at both ends and the plan is free of deadlock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Mesh,
    ModelShape,
    Op,
    Plan,
    Stream,
)

_Work = tuple[Op, int, int, int]
"""Operation, stage, home replica, micro-batch."""


class Shape(NamedTuple):
    """Sizes of a job."""

    tp: int
    pp: int
    dp: int
    microbatches: int
    placement: Sequence[Sequence[int]] = ()
    """Stages of each position, ascending; one each where empty."""

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each position."""
        return tuple(tuple(held) for held in self.placement) or tuple((p,) for p in range(self.pp))


def make_whole_plan(
    shape: Shape,
    *,
    degrees: Mapping[GroupName, int] | None = None,
    gone: Sequence[GroupName] = (),
    slow: Mapping[GroupName, float] | None = None,
    split: bool = True,
    jitter: float = 0.0,
    scatter: bool = False,
    memory_bytes: int | None = None,
    seed: int = 0,
) -> Plan:
    """A valid plan.

    The micro-batches of a group in `gone` are spread over the other replicas; a group in `slow`
    computes that much slower and gives as many away. `degrees` gives groups another TP degree;
    `scatter` cuts transfers between equal degrees too. With `jitter` each group draws its own
    times, so that no two replicas have the same order.
    """
    degrees, slow = degrees or {}, slow or {}
    groups = {
        group.name: group for group in _groups(shape, degrees) if group.name not in frozenset(gone)
    }
    owner = _assign(shape, groups, slow)
    player = _Player(shape, groups, owner, split, scatter)
    rng = random.Random(seed)
    speeds = {name: slow.get(name, 1.0) * (1 + jitter * rng.random()) for name in groups}
    bodies = player.run(lambda name: speeds[name] * (1 + jitter * rng.random()))
    return _plan(shape, groups, bodies, memory_bytes)


def _groups(shape: Shape, degrees: Mapping[GroupName, int]) -> list[Group]:
    groups: list[Group] = []
    for replica in range(shape.dp):
        for pp, held in enumerate(shape.stages):
            name = GroupName(replica, pp)
            first = (replica * shape.pp + pp) * shape.tp
            groups.append(
                Group(
                    replica=replica,
                    pp=pp,
                    ranks=tuple(range(first, first + degrees.get(name, shape.tp))),
                    layers=tuple(LayerRange(stage, stage) for stage in held),
                )
            )
    return groups


def _assign(
    shape: Shape, groups: Mapping[GroupName, Group], slow: Mapping[GroupName, float]
) -> dict[tuple[int, int, int], int]:
    """Who runs each (stage, home, micro-batch): those that a group cannot keep go round."""
    owner: dict[tuple[int, int, int], int] = {}
    for pp, held in enumerate(shape.stages):
        healthy = [
            replica
            for replica in range(shape.dp)
            if (name := GroupName(replica, pp)) in groups and name not in slow
        ]
        turn = 0
        for home in range(shape.dp):
            name = GroupName(home, pp)
            kept = 0
            if name in groups:
                kept = int(shape.microbatches / slow.get(name, 1.0)) if healthy else 1 << 30
            for number in range(shape.microbatches):
                runner = home
                if number >= kept:
                    runner = healthy[(home + turn) % len(healthy)]
                    turn += 1
                owner.update(((stage, home, number), runner) for stage in held)
    return owner


class _Lane:
    """One group while it is played."""

    def __init__(self, name: GroupName, room: int) -> None:
        self.name = name
        self.body: list[Instr] = []
        self.ready: dict[Op, list[tuple[int, int, int, int]]] = {
            Op.F: [],
            Op.B: [],
            Op.W: [],
            Op.BW: [],
        }
        """Heaps of (order of arrival, stage, home, micro-batch)."""
        self.room = room
        """Forwards that it starts before a backward came back."""
        self.busy = False


class _Player:
    def __init__(
        self,
        shape: Shape,
        groups: Mapping[GroupName, Group],
        owner: Mapping[tuple[int, int, int], int],
        split: bool,
        scatter: bool,
    ) -> None:
        self.shape = shape
        self.groups = groups
        self.owner = owner
        self.backward = Op.B if split else Op.BW
        self.scatter = scatter
        self.position = {stage: pp for pp, held in enumerate(shape.stages) for stage in held}
        self.num_stages = len(self.position)
        self.lanes = {
            name: _Lane(name, 2 * self.num_stages - min(shape.stages[name.pp])) for name in groups
        }
        self.tick = 0
        self.instrs: dict[tuple[object, ...], Instr] = {}
        self.left = len(owner) * (3 if split else 2)

    def run(self, time_of: Callable[[GroupName], float]) -> dict[GroupName, tuple[Instr, ...]]:
        """The body of every group."""
        for home in range(self.shape.dp):
            for number in range(self.shape.microbatches):
                self._offer(Op.F, 0, home, number)
        events: list[tuple[float, int, GroupName, _Work]] = []
        now = 0.0
        waking = list(self.lanes)
        while self.left:
            force = False
            while not events or waking:
                for name in waking:
                    lane = self.lanes[name]
                    work = None if lane.busy else self._choose(lane, force)
                    if work is not None:
                        lane.busy = True
                        cost = time_of(name) * (2 if work[0] is Op.BW else 1)
                        self.tick += 1
                        heapq.heappush(events, (now + cost, self.tick, name, work))
                waking = [] if events or force else list(self.lanes)
                force = not events
            now, _, name, work = heapq.heappop(events)
            lane = self.lanes[name]
            lane.busy = False
            waking = [name, *self._finish(lane, work)]
        return {name: (*lane.body, *self._tail(lane)) for name, lane in self.lanes.items()}

    def _tail(self, lane: _Lane) -> list[Instr]:
        held = self.shape.stages[lane.name.pp]
        reduces = [self._instr(Op.REDUCE_GRADS, lane, stage) for stage in held]
        return [*reduces, self._shared(Op.STEP)]

    def _choose(self, lane: _Lane, force: bool) -> _Work | None:
        for op in (self.backward, Op.F, Op.W):
            heap = lane.ready[op]
            if heap and (op is not Op.F or lane.room > 0 or force):
                lane.room += {Op.F: -1, self.backward: 1}.get(op, 0)
                _, stage, home, number = heapq.heappop(heap)
                work = op, stage, home, number
                # The instruction stands where it starts; what it needs has been posted before.
                lane.body.append(self._instr(op, lane, stage, home, number))
                return work
        return None

    def _offer(self, op: Op, stage: int, home: int, number: int) -> GroupName:
        name = GroupName(self.owner[stage, home, number], self.position[stage])
        self.tick += 1
        heapq.heappush(self.lanes[name].ready[op], (self.tick, stage, home, number))
        return name

    def _finish(self, lane: _Lane, work: _Work) -> list[GroupName]:
        """Whom the result of `work` may wake."""
        op, stage, home, number = work
        self.left -= 1
        if op is Op.W:
            return []
        if op is Op.B:
            self._offer(Op.W, stage, home, number)
        step = 1 if op is Op.F else -1
        target = stage + step
        if target == self.num_stages:
            return [self._offer(self.backward, stage, home, number)]
        if target < 0:
            return []
        name = GroupName(self.owner[target, home, number], self.position[target])
        if name != lane.name:
            self._transfer(lane, self.lanes[name], stage, target, home, number)
        return [self._offer(op, target, home, number)]

    def _transfer(
        self, lane: _Lane, other: _Lane, stage: int, target: int, home: int, number: int
    ) -> None:
        what = "ACT" if target > stage else "GRAD"
        degrees = self.groups[lane.name].tp, self.groups[other.name].tp
        cut = self.scatter or degrees[0] != degrees[1]
        if cut:
            lane.body.append(self._instr(Op[f"SCATTER_{what}"], lane, stage, home, number))
        lane.body.append(self._instr(Op[f"SEND_{what}"], lane, stage, home, number, other))
        other.body.append(self._instr(Op[f"RECV_{what}"], other, target, home, number, lane))
        if cut:
            other.body.append(self._instr(Op[f"GATHER_{what}"], other, target, home, number))

    def _instr(
        self,
        op: Op,
        lane: _Lane,
        stage: int,
        home: int | None = None,
        number: int | None = None,
        other: _Lane | None = None,
    ) -> Instr:
        replica, pp = lane.name
        sole = len(self.shape.stages[pp]) == 1
        peer = None if other is None or other.name.replica == replica else other.name.replica
        return self._shared(
            op, number, None if home == replica else home, None if sole else stage, peer
        )

    def _shared(
        self,
        op: Op,
        number: int | None = None,
        home: int | None = None,
        stage: int | None = None,
        peer: int | None = None,
    ) -> Instr:
        key = op, number, home, stage, peer
        known = self.instrs.get(key)
        if known is None:
            known = Instr(op, number, home, stage, peer)
            self.instrs[key] = known
        return known


def _plan(
    shape: Shape,
    groups: Mapping[GroupName, Group],
    bodies: Mapping[GroupName, tuple[Instr, ...]],
    memory_bytes: int | None,
) -> Plan:
    shared: dict[tuple[int, tuple[Instr, ...]], list[int]] = {}
    for name, body in bodies.items():
        shared.setdefault((name.pp, body), []).append(name.replica)
    mesh = Mesh(tp=shape.tp, pp=shape.pp, dp=shape.dp)
    used = {rank for group in groups.values() for rank in group.ranks}
    heads = 2 * shape.tp
    return Plan(
        model=ModelShape(
            name="large",
            layers=sum(map(len, shape.stages)),
            hidden=64 * heads,
            heads=heads,
            kv_heads=heads,
            ffn=256 * heads,
            vocab=512,
        ),
        mesh=mesh,
        batch=Batch(microbatches=shape.microbatches, tokens=1024),
        groups=tuple(groups.values()),
        streams=tuple(
            Stream(replicas=tuple(replicas), pp=pp, body=body)
            for (pp, body), replicas in sorted(shared.items(), key=lambda item: item[0][0])
        ),
        lost=tuple(rank for rank in range(mesh.world) if rank not in used),
        memory_bytes=memory_bytes,
    )
