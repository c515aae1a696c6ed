"""The best plan of a healthy job for given degrees: layers split by cost, within memory.

A stage is as slow as its layers and, on the last one, the head; with a vocabulary of 152,064 that
is worth more than two layers. So the last stage gets fewer layers (an exact min-max over the
positions of the pipeline, `resihp.compiler.partition`), and no position gets more than its devices
can hold under the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from resihp.compiler.capacity import oversized
from resihp.compiler.cluster import Cluster
from resihp.compiler.costs import Lengths, OpCost
from resihp.compiler.layout import laid_out, split_layers
from resihp.compiler.lower import lower
from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import Placed, placed
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, LayerRange, Mesh, ModelShape, Op, Plan, Precision
from resihp.ir.verify.ranges import MAX_INSTRUCTIONS
from resihp.ir.verify.topology import why_not_degree

__all__ = ["Recipe", "check_degrees", "degrees_of", "healthy_plan"]

MAX_TP = 1 << 10
_INSTRUCTIONS_A_TASK = 11
"""Of one micro-batch at one stage: F, B, W, and four transfers that are cut."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; the rest follows from the model and the prices."""

    mesh: Mesh
    batch: Batch
    schedule: str = "1f1b"
    num_chunks: int | None = None
    """Stages per position (None: as many as the schedule has)."""
    layers: tuple[int, ...] | Literal["auto", "even"] = "auto"
    """Of each stage, split by cost, or evenly."""
    precision: Precision = "fp32"
    memory_bytes: int | None = None
    """Of a device; None: as much as needed."""
    transport: str | None = None


def healthy_plan(recipe: Recipe, pricing: Pricing) -> Plan:
    """The plan of `recipe` on healthy devices, lowered; tensors are cut where that is faster.

    Raises UserError for degrees, layers or a schedule that cannot be, and NoFeasiblePlan where the
    model does not fit.
    """
    check_degrees(pricing.shape, recipe.mesh, pricing.cluster)
    stages = placed(recipe.schedule, recipe.mesh.pp, recipe.num_chunks)
    _check_size(recipe, sum(map(len, stages)))
    # What fits depends on one replica, so one is enough to find the layers.
    single = Mesh(tp=recipe.mesh.tp, pp=recipe.mesh.pp, dp=1)
    layers = _layers(_Maker(recipe, single, pricing, stages))
    return _Maker(recipe, recipe.mesh, pricing, stages).make(layers)


def _check_size(recipe: Recipe, num_stages: int) -> None:
    """Refuse what no verifier would look at."""
    most = MAX_INSTRUCTIONS // (_INSTRUCTIONS_A_TASK * num_stages * recipe.mesh.dp)
    if recipe.batch.microbatches > most:
        raise UserError(
            f"{recipe.batch.microbatches} micro-batches in {recipe.mesh.dp} replicas and "
            f"{num_stages} stages are more than is verified; nearest valid: {most}"
        )


class _Maker:
    """Makes lowered plans of one recipe from layers."""

    def __init__(self, recipe: Recipe, mesh: Mesh, pricing: Pricing, stages: Placed) -> None:
        self.recipe = recipe
        self.pricing = pricing
        self.stages = stages
        self.header = Plan(
            model=pricing.shape,
            mesh=mesh,
            batch=recipe.batch,
            groups=(),
            streams=(),
            schedule=recipe.schedule,
            memory_bytes=recipe.memory_bytes,
            transport=recipe.transport,
            precision=recipe.precision,
        )
        lengths = Lengths.of([recipe.batch.tokens])
        layer, head = pricing.costs.layer[mesh.tp], pricing.costs.head[mesh.tp]
        f, b, w = (cost.seconds(lengths) for cost in layer)
        self.layer_s = f + b + w
        self.head_s = _sum(head).seconds(lengths)
        self.cost = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}

    def make(self, layers: Sequence[LayerRange]) -> Plan:
        schedule = laid_out(self.header, self.stages, layers)
        scatter = self.pricing.scatter(self.recipe.batch.tokens)
        return lower(schedule, scatter=scatter, cost=self.cost)


def _layers(maker: _Maker) -> list[LayerRange]:
    """As the recipe says, within memory."""
    said, num_layers = maker.recipe.layers, maker.pricing.shape.layers
    num_stages = sum(map(len, maker.stages))
    if said == "auto":
        return _balanced(maker)
    if said == "even":
        layers = split_layers(num_layers, num_stages)
    else:
        _check_layers(said, num_layers, num_stages)
        layers = ranges_of(said)
    too_big = oversized(maker.make(layers))
    if too_big:
        raise NoFeasiblePlan(str(too_big[0]))
    return layers


def _balanced(maker: _Maker) -> list[LayerRange]:
    """The partition with the smallest largest time of a position that fits."""
    num_layers, stages = maker.pricing.shape.layers, maker.stages
    even = _per_position(split_layers(num_layers, sum(map(len, stages))), stages)
    most = [num_layers] * len(stages)
    refusal: str | None = None
    while True:
        counts = _counts(maker, most, even)
        if counts is None:
            assert refusal is not None, "as many layers as stages always divide"
            raise NoFeasiblePlan(
                f"{refusal}; nor do other splits of the layers fit; a larger tp or pp needs less"
            )
        layers = _in_stages(counts, maker)
        too_big = oversized(maker.make(layers))
        if not too_big:
            return layers
        refusal = str(too_big[0])
        # More layers on a position never need less memory.
        for each in too_big:
            most[each.group.pp] = min(most[each.group.pp], counts[each.group.pp] - 1)


def _counts(maker: _Maker, most: Sequence[int], even: Sequence[int]) -> list[int] | None:
    """Layers of each position, at least one for each of its stages."""
    # A stage's first layer is given; the others are shared out.
    rest = [len(held) - 1 for held in maker.stages]
    num_stages = sum(map(len, maker.stages))
    times = [
        StageTime(
            per_layer=maker.layer_s,
            extra=given * maker.layer_s + (maker.head_s if num_stages - 1 in held else 0.0),
            most_layers=limit - given,
        )
        for held, given, limit in zip(maker.stages, rest, most, strict=True)
    ]
    shared = maker.pricing.shape.layers - sum(rest)
    now = [count - given for count, given in zip(even, rest, strict=True)]
    found = partition(times, shared, now)
    return None if found is None else [c + given for c, given in zip(found, rest, strict=True)]


def _per_position(layers: Sequence[LayerRange], stages: Placed) -> list[int]:
    sizes = [each.last - each.first + 1 for each in layers]
    return [sum(sizes[stage] for stage in held) for held in stages]


def _in_stages(counts: Sequence[int], maker: _Maker) -> list[LayerRange]:
    """The layers of each position shared by its stages, so that none of them takes long."""
    num_stages = sum(map(len, maker.stages))
    sizes = [1] * num_stages
    for held, count in zip(maker.stages, counts, strict=True):
        for _ in range(count - len(held)):
            extra = {stage: maker.head_s if stage == num_stages - 1 else 0.0 for stage in held}
            fewest = min(held, key=lambda s: (sizes[s] * maker.layer_s + extra[s], s))
            sizes[fewest] += 1
    return ranges_of(sizes)


def _check_layers(said: Sequence[int], num_layers: int, num_stages: int) -> None:
    spelled = ",".join(map(str, said))
    if len(said) != num_stages or min(said) < 1 or sum(said) != num_layers:
        even = ",".join(
            str(each.last - each.first + 1) for each in split_layers(num_layers, num_stages)
        )
        raise UserError(
            f"layers {spelled}: {num_stages} stages of one layer or more need {num_layers} in all; "
            f"an even split is {even}"
        )


def degrees_of(model: ModelShape) -> list[int]:
    """TP degrees that divide what TP cuts."""
    degrees = [1 << power for power in range(MAX_TP.bit_length())]
    return [degree for degree in degrees if _why_not(model, degree) is None]


def check_degrees(model: ModelShape, mesh: Mesh, cluster: Cluster) -> None:
    """Raise UserError, with the nearest valid choice, unless `model` runs on such a mesh."""
    for key in ("tp", "pp", "dp"):
        if getattr(mesh, key) < 1:
            raise UserError(f"{key}={getattr(mesh, key)} must be at least 1; nearest valid: 1")
    reason = _why_not(model, mesh.tp)
    if reason is not None:
        degrees = degrees_of(model)
        nearest = min(degrees, key=lambda degree: abs(degree - mesh.tp))
        listed = ", ".join(map(str, degrees))
        raise UserError(f"tp={mesh.tp} {reason}; nearest valid: {nearest} ({listed} are)")
    if mesh.pp > model.layers:
        raise UserError(
            f"pp={mesh.pp}: {model.name} has {model.layers} layers; nearest valid: {model.layers}"
        )
    if mesh.world > cluster.num_devices:
        most = cluster.num_devices // (mesh.tp * mesh.pp)
        advice = f"nearest valid: dp={most}" if most else "a smaller tp or pp fits"
        raise UserError(
            f"tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} are {mesh.world} devices and "
            f"{cluster.cluster.name} has {cluster.num_devices}; {advice}"
        )


def _why_not(model: ModelShape, degree: int) -> str | None:
    mesh, batch = Mesh(tp=degree, pp=1, dp=1), Batch(microbatches=1, tokens=1)
    bare = Plan(model=model, mesh=mesh, batch=batch, groups=(), streams=())
    return why_not_degree(bare, degree)


def _sum(costs: Sequence[OpCost]) -> OpCost:
    total = OpCost(0.0)
    for cost in costs:
        total += cost
    return total
