"""Random schedules that can run: any placement, degrees, migrations, gaps and overlapped pairs."""

from __future__ import annotations

import random

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

__all__ = ["random_schedule"]

_MAX_TP = 4
_Task = tuple[int, int, int]
"""(stage, home, number)"""


def random_schedule(seed: int) -> Plan:
    """A schedule of up to 3 positions, 6 stages and 3 replicas; memory is not checked."""
    rng = random.Random(seed)
    num_positions, num_replicas = rng.randint(1, 3), rng.randint(1, 3)
    at = _positions(rng, num_positions)
    num_microbatches = rng.randint(1, 4)
    mesh = Mesh(tp=_MAX_TP, pp=num_positions, dp=num_replicas)
    groups, standby = _groups(rng, mesh, at)
    present = {group.name for group in groups}
    where = {
        (stage, home, number): _replica(rng, present, pp, home)
        for stage, pp in enumerate(at)
        for home in range(num_replicas)
        for number in range(num_microbatches)
    }
    bodies = _bodies(rng, at, where)
    return Plan(
        model=ModelShape(
            name="random", layers=2 * len(at), hidden=64, heads=8, kv_heads=8, ffn=96, vocab=272
        ),
        mesh=mesh,
        batch=Batch(microbatches=num_microbatches, tokens=32),
        groups=groups,
        streams=tuple(
            Stream(replicas=(name.replica,), pp=name.pp, body=tuple(bodies.get(name, ())))
            for name in sorted(present)
        ),
        standby=standby,
        recompute=tuple(stage for stage in range(len(at)) if rng.random() < 0.2),
        level=Level.SCHEDULE,
    )


def _positions(rng: random.Random, num_positions: int) -> list[int]:
    """The position of each stage."""
    more = rng.randint(0, 6 - num_positions)
    at = [*range(num_positions), *(rng.randrange(num_positions) for _ in range(more))]
    rng.shuffle(at)
    return at


def _groups(
    rng: random.Random, mesh: Mesh, at: list[int]
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """Groups of random degrees, not all of each replica, and the ranks that are left over."""
    groups: list[Group] = []
    for pp in range(mesh.pp):
        layers = tuple(LayerRange(2 * s, 2 * s + 1) for s, there in enumerate(at) if there == pp)
        held_by = {r for r in range(mesh.dp) if rng.random() < 0.8} or {rng.randrange(mesh.dp)}
        for replica in held_by:
            first = (replica * mesh.pp + pp) * mesh.tp
            ranks = rng.sample(range(first, first + mesh.tp), rng.choice((1, 2, 4)))
            groups.append(Group(replica=replica, pp=pp, ranks=tuple(ranks), layers=layers))
    used = {rank for group in groups for rank in group.ranks}
    groups.sort(key=lambda group: group.name)
    return tuple(groups), tuple(rank for rank in range(mesh.world) if rank not in used)


def _replica(rng: random.Random, present: set[GroupName], pp: int, home: int) -> int:
    """Which replica runs a micro-batch at a position: mostly its home."""
    if GroupName(home, pp) in present and rng.random() < 0.8:
        return home
    return rng.choice(sorted(name.replica for name in present if name.pp == pp))


def _bodies(
    rng: random.Random, at: list[int], where: dict[_Task, int]
) -> dict[GroupName, list[Instr]]:
    """Streams made by running whatever can run, in random order, now and then two at once."""
    several = {pp for pp in at if at.count(pp) > 1}
    bodies: dict[GroupName, list[Instr]] = {}
    done: set[tuple[Op, _Task]] = set()
    fused = {task: rng.random() < 0.5 for task in where}

    def following(task: _Task) -> Op | None:
        backward = Op.BW if fused[task] else Op.B
        ops = (Op.F, backward) if fused[task] else (Op.F, backward, Op.W)
        return next((op for op in ops if (op, task) not in done), None)

    def is_ready(task: _Task) -> bool:
        op = following(task)
        stage = task[0]
        if op is None:
            return False
        if op is Op.F:
            return stage == 0 or (Op.F, (stage - 1, *task[1:])) in done
        if op is Op.W or stage == len(at) - 1:
            return True
        return any((back, (stage + 1, *task[1:])) in done for back in (Op.B, Op.BW))

    while ready := [task for task in where if is_ready(task)]:
        chosen = [rng.choice(ready)]
        name = GroupName(where[chosen[0]], at[chosen[0][0]])
        beside = [
            task
            for task in ready
            if task != chosen[0] and GroupName(where[task], at[task[0]]) == name
        ]
        if beside and rng.random() < 0.2:
            chosen.append(rng.choice(beside))
        ops = [following(task) for task in chosen]
        for op, task in zip(ops, chosen, strict=True):
            assert op is not None
            stage, home, number = task
            instr = Instr(
                op,
                number,
                None if home == name.replica else home,
                stage if name.pp in several else None,
                paired=len(chosen) == 2 and task == chosen[0],
            )
            bodies.setdefault(name, []).append(instr)
            done.add((op, task))
    return bodies
