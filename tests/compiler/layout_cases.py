"""Random layouts: any layers, ranks and degrees per group, without streams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from plan_cases import model_of

from resihp.ir.diagnostics import Diagnostic
from resihp.ir.model import Batch, Group, LayerRange, Mesh, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify.adaptation import check_adaptation, check_targets
from resihp.ir.verify.findings import Findings

MESHES = [
    Mesh(tp=tp, pp=pp, dp=dp)
    for tp, pp, dp in [(1, 2, 3), (2, 2, 2), (2, 3, 2), (4, 2, 2), (4, 1, 3), (8, 2, 1), (2, 2, 4)]
]


def random_stages(rng: random.Random, mesh: Mesh, num_layers: int) -> list[tuple[LayerRange, ...]]:
    """Layers of each position: the model cut anywhere, the stages put anywhere."""
    num_stages = rng.randint(mesh.pp, min(2 * mesh.pp + 1, num_layers))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    stages = [LayerRange(a, b - 1) for a, b in pairwise(cuts)]
    where = [*range(mesh.pp), *(rng.randrange(mesh.pp) for _ in range(num_stages - mesh.pp))]
    rng.shuffle(where)
    return [
        tuple(stage for stage, at in zip(stages, where, strict=True) if at == pp)
        for pp in range(mesh.pp)
    ]


def random_groups(
    rng: random.Random, mesh: Mesh, stages: Sequence[tuple[LayerRange, ...]], ranks: Sequence[int]
) -> tuple[Group, ...]:
    """Groups of any degree from some of `ranks`; the first replica is whole."""
    pool = list(ranks)
    if rng.random() < 0.5:
        rng.shuffle(pool)
    groups: list[Group] = []
    for replica in range(mesh.dp):
        for pp in range(mesh.pp):
            degree = 1 << rng.randint(0, mesh.tp.bit_length() - 1)
            degree = mesh.tp if rng.random() < 0.4 else degree
            if replica == 0:
                left_after = mesh.pp - pp - 1
                degree = degree if degree + left_after <= len(pool) else 1
            elif rng.random() < 0.15 or degree > len(pool):
                continue
            members, pool = pool[:degree], pool[degree:]
            groups.append(Group(replica=replica, pp=pp, ranks=tuple(members), layers=stages[pp]))
    return tuple(groups)


def random_layout(
    rng: random.Random, mesh: Mesh, num_layers: int, lost: frozenset[int] = frozenset()
) -> Plan:
    """A plan that has groups and nothing else, of the live ranks."""
    alive = [rank for rank in range(mesh.world) if rank not in lost]
    groups = random_groups(rng, mesh, random_stages(rng, mesh, num_layers), alive)
    return layout(mesh, num_layers, groups, lost)


def layout(
    mesh: Mesh, num_layers: int, groups: tuple[Group, ...], lost: frozenset[int] = frozenset()
) -> Plan:
    """A plan of these groups; all other live ranks are standby."""
    told = {rank for group in groups for rank in group.ranks} | lost
    return Plan(
        model=model_of(layers=num_layers),
        mesh=mesh,
        batch=Batch(microbatches=2, tokens=32),
        groups=groups,
        streams=(),
        standby=tuple(rank for rank in range(mesh.world) if rank not in told),
        lost=tuple(sorted(lost)),
    )


def adaptation_findings(plan: Plan, previous: Plan) -> list[Diagnostic]:
    """RHP8xx, warnings included, of a plan whose streams do not matter."""
    parsed = parse(print_plan(plan))
    assert parsed.plan == plan
    found = Findings()
    check_targets(parsed, found)
    check_adaptation(parsed, previous, found)
    return found.sorted()
