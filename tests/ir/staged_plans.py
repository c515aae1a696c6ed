"""Random right plans of any shape: several stages per group in any place, work moved between
replicas, unequal TP degrees, missing positions.

One random order of all work that respects what needs what is dealt out to the groups; each
receive is listed when its tensor is sent, so that channels agree and nothing can get stuck.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from plan_build import MODEL

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Mesh,
    Op,
    Plan,
    Stream,
)

__all__ = ["Owners", "Staged", "random_staged", "staged_plan"]


class Task(NamedTuple):
    """F, B, W or BW of one micro-batch at one stage."""

    op: Op
    stage: int
    home: int
    microbatch: int


Owners = Mapping[tuple[int, int, int], int]
"""Replica that runs (stage, home, micro-batch)."""


class Staged(NamedTuple):
    """A plan and what it was made from."""

    plan: Plan
    positions: list[int]
    """Position in the pipeline of each stage."""
    owners: Owners
    scatter: bool
    """Transfers between equal degrees are cut too."""


def random_staged(rng: random.Random, mesh: Mesh | None = None) -> Staged:
    """A plan without findings."""
    if mesh is None:
        mesh = Mesh(tp=rng.choice((1, 2, 4)), pp=rng.choice((1, 2, 3)), dp=rng.choice((1, 2, 3)))
    pp, dp = mesh.pp, mesh.dp
    num_stages = rng.randint(pp, min(2 * pp + 1, MODEL.layers))
    positions = [*range(pp), *(rng.randrange(pp) for _ in range(num_stages - pp))]
    rng.shuffle(positions)
    cuts = sorted(rng.sample(range(1, MODEL.layers), num_stages - 1))
    edges = [0, *cuts, MODEL.layers]
    layers = [LayerRange(edges[i], edges[i + 1] - 1) for i in range(num_stages)]
    groups = tuple(_groups(rng, mesh, positions, layers))
    num_microbatches = rng.choice((1, 2, 3))
    holders = {pos: [g.replica for g in groups if g.pp == pos] for pos in range(pp)}
    owners = {
        (stage, home, number): home
        if home in holders[position] and rng.random() < 0.8
        else rng.choice(holders[position])
        for stage, position in enumerate(positions)
        for home in range(dp)
        for number in range(num_microbatches)
    }
    scatter = rng.random() < 0.3
    plan = staged_plan(rng, mesh, groups, positions, owners, num_microbatches, scatter)
    return Staged(plan, positions, owners, scatter)


def _groups(
    rng: random.Random, mesh: Mesh, positions: list[int], layers: list[LayerRange]
) -> Iterator[Group]:
    for position in range(mesh.pp):
        present = [replica for replica in range(mesh.dp) if rng.random() < 0.85]
        for replica in present or [rng.randrange(mesh.dp)]:
            first = (replica * mesh.pp + position) * mesh.tp
            degree = rng.choice([d for d in (1, 2, 4) if d <= mesh.tp])
            yield Group(
                replica=replica,
                pp=position,
                ranks=tuple(range(first, first + degree)),
                layers=tuple(
                    held for held, at in zip(layers, positions, strict=True) if at == position
                ),
            )


def staged_plan(
    rng: random.Random,
    mesh: Mesh,
    groups: tuple[Group, ...],
    positions: list[int],
    owners: Owners,
    num_microbatches: int,
    scatter: bool,
) -> Plan:
    """The plan in which `owners` run the stages that stand at `positions`, in a random order."""
    deal = _Deal(rng, groups, positions, owners, scatter)
    for task in _in_some_order(rng, len(positions), owners):
        deal.compute(task)
    used = {rank for group in groups for rank in group.ranks}
    return Plan(
        model=MODEL,
        mesh=mesh,
        batch=Batch(microbatches=num_microbatches, tokens=16),
        groups=groups,
        streams=tuple(
            Stream(replicas=(name.replica,), pp=name.pp, body=tuple(body))
            for name, body in deal.finished().items()
        ),
        standby=tuple(rank for rank in range(mesh.world) if rank not in used),
    )


def _in_some_order(rng: random.Random, num_stages: int, owners: Owners) -> Iterator[Task]:
    """All work; what a task needs comes before it."""
    fused = {key: rng.random() < 0.5 for key in owners}
    waiting: dict[Task, set[Task]] = {}
    for stage, home, number in owners:

        def back(at: int, key: tuple[int, int] = (home, number)) -> Task:
            return Task(Op.BW if fused[at, *key] else Op.B, at, *key)

        forward = Task(Op.F, stage, home, number)
        waiting[forward] = {Task(Op.F, stage - 1, home, number)} if stage else set()
        waiting[back(stage)] = {forward}
        if stage + 1 < num_stages:
            waiting[back(stage)].add(back(stage + 1))
        if not fused[stage, home, number]:
            waiting[Task(Op.W, stage, home, number)] = {back(stage)}
    while waiting:
        task = rng.choice([task for task, needs in waiting.items() if not needs])
        del waiting[task]
        for needs in waiting.values():
            needs.discard(task)
        yield task


class _Deal:
    """Streams that grow task by task."""

    def __init__(
        self,
        rng: random.Random,
        groups: tuple[Group, ...],
        positions: list[int],
        owners: Owners,
        scatter: bool,
    ) -> None:
        self.rng = rng
        self.groups = {group.name: group for group in groups}
        self.positions = positions
        self.owners = owners
        self.scatter = scatter
        self.bodies: dict[GroupName, list[Instr]] = {name: [] for name in self.groups}
        self.to_gather: set[Task] = set()
        """Tasks whose input arrives in chunks."""

    def at(self, task: Task, stage: int | None = None) -> GroupName:
        stage = task.stage if stage is None else stage
        replica = self.owners[stage, task.home, task.microbatch]
        return GroupName(replica, self.positions[stage])

    def emit(self, name: GroupName, op: Op, task: Task, peer: GroupName | None = None) -> None:
        """Defaults are written out now and then."""
        home = None if task.home == name.replica else task.home
        other = None if peer is None or peer.replica == name.replica else peer.replica
        several = len(self.groups[name].layers) > 1
        spell = self.rng.random() < 0.1
        self.bodies[name].append(
            Instr(
                op,
                task.microbatch,
                task.home if spell else home,
                task.stage if several else None,
                None if peer is None else peer.replica if spell else other,
            )
        )

    def compute(self, task: Task) -> None:
        here, forward = self.at(task), task.op is Op.F
        kind = "ACT" if forward else "GRAD"
        key = task._replace(op=Op.F if forward else Op.B)
        if task.op is not Op.W and key in self.to_gather:
            self.emit(here, Op[f"GATHER_{kind}"], task)
        self.emit(here, task.op, task)
        far = task.stage + 1 if forward else task.stage - 1
        if task.op is Op.W or not 0 <= far < len(self.positions):
            return
        there = self.at(task, far)
        if here == there:
            return
        user = key._replace(stage=far)
        cut = self.scatter or self.groups[here].tp != self.groups[there].tp
        if cut:
            self.emit(here, Op[f"SCATTER_{kind}"], task)
            self.to_gather.add(user)
        self.emit(here, Op[f"SEND_{kind}"], task, there)
        self.emit(there, Op[f"RECV_{kind}"], user, here)

    def finished(self) -> dict[GroupName, list[Instr]]:
        for name, body in self.bodies.items():
            stages = [s for s, position in enumerate(self.positions) if position == name.pp]
            several = len(stages) > 1
            body += [Instr(Op.REDUCE_GRADS, stage=s if several else None) for s in stages]
            body.append(Instr(Op.STEP))
        return self.bodies
