"""The healthy plan: which rank holds which layers when nothing has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from resihp.compiler.capacity import oversized
from resihp.compiler.lower import lower
from resihp.compiler.partition import ranges_of
from resihp.compiler.schedules import Placed, placed
from resihp.compiler.work import home_work, ordered
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Group, LayerRange, Mesh, ModelShape, Plan, Precision

if TYPE_CHECKING:
    from resihp.compiler.costs import Lengths
    from resihp.compiler.pricing import Pricing

__all__ = ["initial_plan", "laid_out", "split_layers"]


def initial_plan(
    model: ModelShape,
    mesh: Mesh,
    batch: Batch,
    *,
    schedule: str = "1f1b",
    num_chunks: int | None = None,
    memory_bytes: int | None = None,
    precision: Precision = "fp32",
    recomputes: bool = False,
    pricing: Pricing | None = None,
) -> Plan:
    """The plan of a healthy job: rank (replica * pp + position) * tp + i is member i of its group.

    Each group runs as many stages as the schedule has where nothing is said, or `num_chunks`.
    With `recomputes` all stages compute their forward again in B. Layers are split evenly;
    `resihp.compiler.healthy` splits them by cost. An automatic schedule is made for
    `memory_bytes` and `pricing` (`ordered`).

    Raises UserError for an unknown schedule, a number of stages per group that it does not have,
    fewer layers than stages, or an automatic schedule without `memory_bytes`, and NoFeasiblePlan
    when a device of `memory_bytes` cannot hold what its group needs.
    """
    stages = placed(schedule, mesh.pp, num_chunks)
    header = Plan(
        model=model,
        mesh=mesh,
        batch=batch,
        groups=(),
        streams=(),
        schedule=schedule,
        memory_bytes=memory_bytes,
        precision=precision,
        recompute=tuple(range(sum(map(len, stages)))) if recomputes else (),
    )
    layers = split_layers(model.layers, sum(map(len, stages)))
    plan = lower(laid_out(header, stages, layers, pricing))
    too_big = oversized(plan)
    if too_big:
        raise NoFeasiblePlan(str(too_big[0]))
    return plan


def laid_out(
    header: Plan,
    stages: Placed,
    layers: Sequence[LayerRange],
    pricing: Pricing | None = None,
    lengths: Sequence[Lengths] | None = None,
) -> Plan:
    """The schedule of a healthy job that `header` begins: its groups, and who runs what in order.

    `stages` are those of each position, `layers` those of each stage; `pricing` and
    `lengths` are for automatic schedules (`ordered`).
    """
    mesh = header.mesh
    assert header.schedule is not None
    groups = tuple(
        Group(
            replica=replica,
            pp=pp,
            ranks=_ranks(mesh, replica, pp),
            layers=tuple(layers[stage] for stage in held),
        )
        for replica in range(mesh.dp)
        for pp, held in enumerate(stages)
    )
    work = home_work(range(mesh.dp), header.batch.microbatches)
    plan = msgspec.structs.replace(header, groups=groups)
    return ordered(plan, header.schedule, work, pricing, lengths)


def split_layers(num_layers: int, num_stages: int) -> list[LayerRange]:
    """Contiguous layers for each stage, as even as possible.

    The layers that are left over go to the middle stages, then to the first and at last to the
    last one, since those two have the embedding and the head beside their layers.
    """
    if num_layers < num_stages:
        raise UserError(
            f"{num_stages} stages: each needs a layer and the model has {num_layers}; "
            f"nearest valid: {num_layers}"
        )
    counts = [num_layers // num_stages] * num_stages
    by_preference = [*range(1, num_stages - 1), 0, num_stages - 1]
    for stage in by_preference[: num_layers % num_stages]:
        counts[stage] += 1
    return ranges_of(counts)


def _ranks(mesh: Mesh, replica: int, pp: int) -> tuple[int, ...]:
    first = (replica * mesh.pp + pp) * mesh.tp
    return tuple(range(first, first + mesh.tp))
