"""The healthy plan: which rank holds which layers when nothing has failed."""

from __future__ import annotations

from resihp.compiler.capacity import oversized
from resihp.compiler.lower import home_work, lower
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Group, LayerRange, Mesh, ModelShape, Plan

__all__ = ["initial_plan", "split_layers"]


def initial_plan(
    model: ModelShape,
    mesh: Mesh,
    batch: Batch,
    *,
    schedule: str = "1f1b",
    memory_bytes: int | None = None,
) -> Plan:
    """The plan of a healthy job: rank (replica * pp + stage) * tp + i is member i of its group.

    Raises UserError for an unknown schedule or fewer layers than stages, and NoFeasiblePlan when
    a device of `memory_bytes` cannot hold what its stage needs.
    """
    layers = split_layers(model.layers, mesh.pp)
    groups = tuple(
        Group(
            replica=replica, pp=stage, ranks=_ranks(mesh, replica, stage), layers=(layers[stage],)
        )
        for replica in range(mesh.dp)
        for stage in range(mesh.pp)
    )
    work = home_work(range(mesh.dp), batch.microbatches)
    plan = Plan(
        model=model,
        mesh=mesh,
        batch=batch,
        groups=groups,
        streams=lower(groups, work, schedule, mesh.pp),
        schedule=schedule,
        memory_bytes=memory_bytes,
    )
    too_big = oversized(plan)
    if too_big:
        raise NoFeasiblePlan(str(too_big[0]))
    return plan


def split_layers(num_layers: int, num_stages: int) -> list[LayerRange]:
    """Contiguous layers for each stage, as even as possible.

    The layers that are left over go to the middle stages, then to the first and at last to the
    last one, since those two have the embedding and the head beside their layers.
    """
    if num_layers < num_stages:
        raise UserError(
            f"pp = {num_stages}: each stage needs a layer and the model has {num_layers}; "
            f"nearest valid: {num_layers}"
        )
    counts = [num_layers // num_stages] * num_stages
    by_preference = [*range(1, num_stages - 1), 0, num_stages - 1]
    for stage in by_preference[: num_layers % num_stages]:
        counts[stage] += 1
    firsts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [
        LayerRange(first, first + count - 1) for first, count in zip(firsts, counts, strict=True)
    ]


def _ranks(mesh: Mesh, replica: int, stage: int) -> tuple[int, ...]:
    first = (replica * mesh.pp + stage) * mesh.tp
    return tuple(range(first, first + mesh.tp))
