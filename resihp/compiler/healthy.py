"""The best plan of a healthy job for given degrees: layers split by cost, within memory.

A stage is as slow as its layers and, on the last one, the head; with a vocabulary of 152,064 that
is worth more than two layers. So the last stage gets fewer layers (an exact min-max over the
positions of the pipeline, `resihp.compiler.partition`), and no position gets more than its devices
can hold under the schedule. With few micro-batches it matters more which stage has to reduce most
gradients when all is done, so of several splits the one that simulates fastest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from resihp.compiler.capacity import Oversized
from resihp.compiler.cluster import Cluster
from resihp.compiler.costs import Lengths
from resihp.compiler.layout import laid_out, split_layers
from resihp.compiler.links import reduce_seconds
from resihp.compiler.lower import lower
from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import AUTOMATIC, ONE_STAGE, Placed, placed
from resihp.compiler.simulate import Simulation, simulate
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, LayerRange, Mesh, ModelShape, Op, Plan, Precision
from resihp.ir.verify.ranges import MAX_INSTRUCTIONS
from resihp.ir.verify.topology import why_not_degree

__all__ = [
    "MAX_TOKENS",
    "Recipe",
    "Split",
    "check_degrees",
    "degrees_of",
    "draft_plan",
    "healthy_plan",
]

MAX_TP = 1 << 10
MAX_TOKENS = 1 << 26
"""Of a micro-batch; the sizes of more are beyond all machines."""
_INSTRUCTIONS_A_TASK = 11
"""Of one micro-batch at one stage: F, B, W, and four transfers that are cut."""


Split = Literal["auto", "balanced", "even"]
"""Layers as even as possible; or so that the slowest position computes as fast as can be; or the
fastest split by simulation, of these and one that is balanced with the reduction counted."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; the rest follows from the model and the prices."""

    mesh: Mesh
    batch: Batch
    schedule: str = "1f1b"
    num_chunks: int | None = None
    """Stages per position (None: as many as the schedule has)."""
    layers: tuple[int, ...] | Split = "auto"
    """Of each stage."""
    precision: Precision = "fp32"
    memory_bytes: int | None = None
    """Of a device; None: as much as needed."""
    transport: str | None = None
    documents: int = 1
    """Of equal length in a micro-batch; attention is inside of each."""

    @property
    def lengths(self) -> Lengths:
        """Of a micro-batch."""
        length, rest = divmod(self.batch.tokens, self.documents)
        return Lengths.of([length] * self.documents + [rest] * (rest > 0))


def healthy_plan(recipe: Recipe, pricing: Pricing) -> Plan:
    """The plan of `recipe` on healthy devices, lowered; tensors are cut where that is faster.

    Raises UserError for degrees, layers or a schedule that cannot be, and NoFeasiblePlan where the
    model does not fit.
    """
    check_degrees(pricing.shape, recipe.mesh, pricing.cluster)
    stages = placed(recipe.schedule, recipe.mesh.pp, recipe.num_chunks)
    _check_size(recipe, sum(map(len, stages)))
    # What fits depends on one replica, so one is enough to find the layers.
    single = _Maker(recipe, Mesh(tp=recipe.mesh.tp, pp=recipe.mesh.pp, dp=1), pricing, stages)
    whole = single if recipe.mesh.dp == 1 else _Maker(recipe, recipe.mesh, pricing, stages)
    if recipe.layers == "auto":
        splits = _splits(single, whole)
        if recipe.schedule in AUTOMATIC:
            splits += _best_named_split(single, whole)
        return _fastest(whole, splits)
    return whole.make(tuple(_layers(single, recipe.layers)))


def draft_plan(recipe: Recipe, pricing: Pricing) -> Simulation:
    """One replica of the schedule that `healthy_plan` lowers, played; many times as quick to have.

    What it takes is `Simulation.compute_s`: nothing is reduced. Raises as `healthy_plan` does, but
    not where only the buffers do not fit.
    """
    assert recipe.layers != "auto", "a split that is found by plans"
    check_degrees(pricing.shape, recipe.mesh, pricing.cluster)
    stages = placed(recipe.schedule, recipe.mesh.pp, recipe.num_chunks)
    _check_size(recipe, sum(map(len, stages)))
    maker = _Maker(recipe, Mesh(tp=recipe.mesh.tp, pp=recipe.mesh.pp, dp=1), pricing, stages)
    layers = _layers(maker, recipe.layers, is_draft=True)
    return maker.simulated(maker.order(tuple(layers)))


def _splits(single: _Maker, whole: _Maker) -> list[list[LayerRange]]:
    """Some splits that fit."""
    splits = [_balanced(single, single.compute_s), _balanced(single, whole.total_s)]
    with suppress(NoFeasiblePlan):
        splits.append(_layers(single, "even"))
    return splits


def _best_named_split(single: _Maker, whole: _Maker) -> list[list[LayerRange]]:
    """That of the fastest named schedule with one stage per position, if any fits.

    An automatic order finds a way within the memory of any split, but where memory is short it is
    faster on a split that leaves the first positions more.
    """
    found: list[tuple[float, tuple[LayerRange, ...]]] = []
    for kind in ONE_STAGE:
        one, all_of_them = single.of(kind), whole.of(kind)
        with suppress(NoFeasiblePlan):
            plan = _fastest(all_of_them, _splits(one, all_of_them))
            layers = tuple(group.sole_layers for group in plan.groups if group.replica == 0)
            found.append((all_of_them.simulated(plan).iteration_s, layers))
    return [list(min(found)[1])] if found else []


def _fastest(whole: _Maker, splits: Sequence[Sequence[LayerRange]]) -> Plan:
    """Of some splits the one whose plan takes the least time."""
    plans = [whole.make(layers) for layers in dict.fromkeys(map(tuple, splits))]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: whole.simulated(plan).iteration_s)


def _check_size(recipe: Recipe, num_stages: int) -> None:
    """Refuse what no verifier would look at."""
    if recipe.batch.tokens > MAX_TOKENS:
        raise UserError(
            f"micro-batches of {recipe.batch.tokens} tokens are larger than any device; nearest "
            f"valid: {MAX_TOKENS}"
        )
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
        lengths = recipe.lengths
        self._orders: dict[tuple[LayerRange, ...], Plan] = {}
        self._plans: dict[tuple[LayerRange, ...], Plan] = {}
        layer, head = pricing.costs.layer[mesh.tp], pricing.costs.head[mesh.tp]
        f, b, w = (cost.seconds(lengths) for cost in layer)
        self.cost = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}
        head_s = sum(cost.seconds(lengths) for cost in head)
        self.compute_s = _Load(f + b + w, 0.0, head_s)
        self.total_s = self.compute_s.and_once(_reduce_s(pricing, mesh), recipe.batch.microbatches)

    def of(self, kind: str) -> _Maker:
        """The same for another schedule with one stage per position."""
        recipe = msgspec.structs.replace(self.recipe, schedule=kind)
        return _Maker(recipe, self.header.mesh, self.pricing, self.stages)

    def order(self, layers: tuple[LayerRange, ...]) -> Plan:
        """The schedule with these layers of each stage."""
        if layers not in self._orders:
            self._orders[layers] = laid_out(
                self.header, self.stages, layers, self.pricing, [self.recipe.lengths]
            )
        return self._orders[layers]

    def make(self, layers: tuple[LayerRange, ...]) -> Plan:
        """The lowered plan with these layers of each stage."""
        if layers not in self._plans:
            scatter = self.pricing.scatter(self.recipe.batch.tokens)
            self._plans[layers] = lower(self.order(layers), scatter=scatter, cost=self.cost)
        return self._plans[layers]

    def oversized(self, layers: Sequence[LayerRange], *, is_draft: bool) -> list[Oversized]:
        """Groups that need more memory than there is; as `capacity.oversized`, but quicker."""
        if self.header.memory_bytes is None:
            return []
        # A schedule has no buffers: what does not fit there never does.
        found = self._oversized(self.order(tuple(layers)))
        return found if found or is_draft else self._oversized(self.make(tuple(layers)))

    def _oversized(self, plan: Plan) -> list[Oversized]:
        assert plan.memory_bytes is not None
        peaks = self.simulated(plan).peaks()
        return [
            Oversized(peak.group, peak.num_bytes, plan.memory_bytes)
            for peak in peaks
            if peak.num_bytes > plan.memory_bytes
        ]

    def simulated(self, plan: Plan) -> Simulation:
        """A plan or schedule of the recipe, played."""
        return simulate(plan, self.pricing, lengths=[self.recipe.lengths])


class _Load(NamedTuple):
    """Seconds of a micro-batch that a position takes, by what it holds."""

    layer: float
    embedding: float
    head: float

    def and_once(self, other: _Load, num_microbatches: int) -> _Load:
        """With the share of what is done once in an iteration."""
        return _Load(
            *(mine + its / num_microbatches for mine, its in zip(self, other, strict=True))
        )

    def extra(self, held: Sequence[int], num_stages: int) -> float:
        """Beside the layers."""
        return (self.embedding if 0 in held else 0.0) + (
            self.head if num_stages - 1 in held else 0.0
        )


def _reduce_s(pricing: Pricing, mesh: Mesh) -> _Load:
    """Reducing the gradients of a layer, and of each of the tables."""
    costs, cluster = pricing.costs, pricing.cluster
    per_node = cluster.cluster.gpus_per_node
    layer, table = (
        reduce_seconds(cluster, mesh.dp, num_bytes / mesh.tp, per_node)
        for num_bytes in (costs.layer_parameter_bytes, costs.table_parameter_bytes)
    )
    return _Load(layer, table, table)


def _layers(
    maker: _Maker, said: tuple[int, ...] | Split, *, is_draft: bool = False
) -> list[LayerRange]:
    """As is said, within memory; that of a draft has no buffers."""
    num_layers = maker.pricing.shape.layers
    num_stages = sum(map(len, maker.stages))
    if said == "balanced":
        return _balanced(maker, maker.compute_s, is_draft=is_draft)
    if isinstance(said, str):
        layers = split_layers(num_layers, num_stages)
    else:
        _check_layers(said, num_layers, num_stages)
        layers = ranges_of(said)
    too_big = maker.oversized(layers, is_draft=is_draft)
    if too_big:
        raise NoFeasiblePlan(str(too_big[0]))
    return layers


def _balanced(maker: _Maker, load: _Load, *, is_draft: bool = False) -> list[LayerRange]:
    """The partition with the smallest largest load of a position that fits."""
    num_layers, stages = maker.pricing.shape.layers, maker.stages
    even = _per_position(split_layers(num_layers, sum(map(len, stages))), stages)
    most = [num_layers] * len(stages)
    refusal: str | None = None
    while True:
        counts = _counts(maker, load, most, even)
        if counts is None:
            assert refusal is not None, "as many layers as stages always divide"
            raise NoFeasiblePlan(
                f"{refusal}; nor do other splits of the layers fit; a larger tp or pp needs less"
            )
        layers = _in_stages(counts, load, maker.stages)
        too_big = maker.oversized(layers, is_draft=is_draft)
        if not too_big:
            return layers
        refusal = str(too_big[0])
        # More layers on a position never need less memory.
        for each in too_big:
            most[each.group.pp] = min(most[each.group.pp], counts[each.group.pp] - 1)


def _counts(
    maker: _Maker, load: _Load, most: Sequence[int], even: Sequence[int]
) -> list[int] | None:
    """Layers of each position, at least one for each of its stages."""
    # A stage's first layer is given; the others are shared out.
    rest = [len(held) - 1 for held in maker.stages]
    num_stages = sum(map(len, maker.stages))
    times = [
        StageTime(
            per_layer=load.layer,
            extra=given * load.layer + load.extra(held, num_stages),
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


def _in_stages(counts: Sequence[int], load: _Load, stages: Placed) -> list[LayerRange]:
    """The layers of each position shared by its stages, so that none of them takes long."""
    num_stages = sum(map(len, stages))
    sizes = [1] * num_stages
    for held, count in zip(stages, counts, strict=True):
        extra = {stage: load.extra((stage,), num_stages) for stage in held}
        for _ in range(count - len(held)):
            fewest = min(held, key=lambda s: (sizes[s] * load.layer + extra[s], s))
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
