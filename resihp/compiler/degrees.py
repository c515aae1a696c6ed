"""The best degrees, micro-batches and schedule of a job, found by simulation.

Every way to cut the job is estimated by the formula of its schedule, as if layers could be split
to any size. In the order of these estimates, which hardly a plan beats, schedules are made and
simulated until no estimate is below the best time found. Of the fastest the plans are made, with
all that they send and reduce, and simulated as they would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from resihp.compiler.costs import Lengths
from resihp.compiler.facts import stage_facts
from resihp.compiler.healthy import (
    MAX_TOKENS,
    Recipe,
    Split,
    degrees_of,
    draft_plan,
    healthy_plan,
)
from resihp.compiler.links import reduce_seconds
from resihp.compiler.models import Model
from resihp.compiler.prediction import Prediction, predict
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import AUTOMATIC, SCHEDULES, placed
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.facts import StageFacts
from resihp.ir.model import Batch, Group, LayerRange, Mesh, ModelShape, Plan, Precision

__all__ = ["Choice", "Job", "Result", "candidates", "search"]

_LEAST_DRAFTS = 16
_MOST_DRAFTS = 400
_MOST_PLANS = 10
_MOST_TASKS = 1 << 14
"""Micro-batches times positions in the plans of all choices, but for the first three."""
_NEED_ALL = ("gpipe", "looped-bfs")
"""Schedules whose memory grows with the micro-batches."""
_FEWEST_LAYERS = 4
"""Of models whose layers 1 and 2 are neither the first nor the last."""
_MOST_AUTOMATIC = 2
_LARGEST_AUTOMATIC = 2048
"""Micro-batches times positions of a replica."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be trained, on how many devices at most."""

    num_devices: int
    global_batch: int
    """Sequences of a step."""
    sequence_tokens: int
    precision: Precision = "bf16"
    memory_bytes: int | None = None
    """Of a device."""
    fewest_replicas: int = 1
    """With a single one the state of a lost rank is nowhere else."""
    schedules: tuple[str, ...] = SCHEDULES
    transport: str | None = None


class Candidate(NamedTuple):
    """One way to cut the job; ordered by what it is estimated to take."""

    estimate_s: float
    tp: int
    pp: int
    dp: int
    schedule: str
    microbatches: int
    sequences: int
    """Of a micro-batch."""

    def recipe(self, job: Job, layers: Split = "auto") -> Recipe:
        """Of its plan, or of a schedule whose layers are split at once."""
        return Recipe(
            mesh=Mesh(tp=self.tp, pp=self.pp, dp=self.dp),
            batch=Batch(
                microbatches=self.microbatches, tokens=self.sequences * job.sequence_tokens
            ),
            schedule=self.schedule,
            layers=layers,
            precision=job.precision,
            memory_bytes=job.memory_bytes,
            transport=job.transport,
            documents=self.sequences,
        )


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A way that was simulated, and what is predicted of it."""

    tp: int
    pp: int
    dp: int
    schedule: str
    microbatches: int
    """Of each replica."""
    sequences: int
    """Of a micro-batch."""
    estimate_s: float
    prediction: Prediction


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The choices whose plans were simulated, the fastest first."""

    choices: tuple[Choice, ...]
    num_candidates: int
    """Ways to cut the job that may fit the devices."""
    num_drafts: int
    """Of those: whose schedule was made."""
    num_too_large: int
    """Of those: whose activations then did not fit."""
    is_complete: bool
    """No candidate without a draft is estimated to be faster than the fastest draft."""


class _Drafts(NamedTuple):
    fastest: list[tuple[float, Candidate]]
    """Seconds, ascending."""
    num_too_large: int
    is_complete: bool


def search(job: Job, model: Model, pricing: Pricing) -> tuple[Result, Plan]:
    """The choices, and the plan of the first one.

    Raises UserError for a batch or schedules that cannot be, and NoFeasiblePlan where nothing fits.
    """
    _check_job(job)
    ordered = sorted(candidates(job, pricing))
    drafts = _drafts(ordered, job, pricing)
    choices: list[tuple[Choice, Plan]] = []
    num_too_large, num_tasks = drafts.num_too_large, 0
    for candidate in _with_automatic([candidate for _, candidate in drafts.fastest], job):
        choice = _choice(candidate, job, model, pricing)
        num_too_large += choice is None
        choices += [] if choice is None else [choice]
        num_tasks += candidate.pp * candidate.microbatches
        if len(choices) == _MOST_PLANS or (len(choices) >= 3 and num_tasks > _MOST_TASKS):
            break
    if not choices:
        raise NoFeasiblePlan(
            f"{model.shape.name} on {job.num_devices} devices: no way to cut it into "
            f"{job.fewest_replicas} replicas or more fits their memory; more devices, fewer "
            "replicas or shorter sequences need less"
        )
    choices.sort(key=lambda each: (each[0].prediction.iteration_s, each[0].tp * each[0].pp))
    result = Result(
        choices=tuple(choice for choice, _ in choices),
        num_candidates=len(ordered),
        num_drafts=len(drafts.fastest) + drafts.num_too_large,
        num_too_large=num_too_large,
        is_complete=drafts.is_complete,
    )
    return result, choices[0][1]


def _drafts(ordered: Sequence[Candidate], job: Job, pricing: Pricing) -> _Drafts:
    """Schedules in the order of the estimates, as long as one may be the fastest."""
    found: list[tuple[float, Candidate]] = []
    best_s = float("inf")
    for index, candidate in enumerate(ordered):
        is_slower = candidate.estimate_s >= best_s
        if (is_slower and len(found) >= _LEAST_DRAFTS) or index == _MOST_DRAFTS:
            return _Drafts(sorted(found), index - len(found), is_slower)
        with suppress(NoFeasiblePlan):
            seconds = _draft_s(candidate, job, pricing) + _reduce_s(candidate, pricing)
            found.append((seconds, candidate))
            best_s = min(best_s, seconds)
    return _Drafts(sorted(found), len(ordered) - len(found), is_complete=True)


def _draft_s(candidate: Candidate, job: Job, pricing: Pricing) -> float:
    """Until all is computed, by a schedule of enough micro-batches to fill and drain the pipeline.

    Each further one adds what the busiest position takes.
    """
    enough = max(2 * candidate.pp, 16)
    if candidate.schedule in _NEED_ALL or candidate.microbatches <= enough:
        return draft_plan(candidate.recipe(job, "balanced"), pricing).compute_s
    short = candidate._replace(microbatches=enough)
    draft = draft_plan(short.recipe(job, "balanced"), pricing)
    each_s = float(draft.busy_s.max()) / enough
    return draft.compute_s + (candidate.microbatches - enough) * each_s


def _with_automatic(fastest: Sequence[Candidate], job: Job) -> Iterator[Candidate]:
    """Before the first candidates of some degrees and micro-batches, one with an automatic order.

    Making that order takes as long as many drafts, so it is not for all.
    """
    automatic = [kind for kind in job.schedules if kind in AUTOMATIC]
    cuts: set[tuple[object, ...]] = set()
    for candidate in fastest:
        cut = candidate._replace(estimate_s=0.0, schedule="")
        is_small = candidate.pp * candidate.microbatches <= _LARGEST_AUTOMATIC
        if cut not in cuts and len(cuts) < _MOST_AUTOMATIC and is_small:
            cuts.add(cut)
            yield from (candidate._replace(schedule=kind) for kind in automatic)
        if candidate.schedule not in automatic:
            yield candidate


def _choice(
    candidate: Candidate, job: Job, model: Model, pricing: Pricing
) -> tuple[Choice, Plan] | None:
    """None where buffers do not fit."""
    recipe = candidate.recipe(job)
    try:
        plan = healthy_plan(recipe, pricing)
    except NoFeasiblePlan:
        return None
    prediction = predict(plan, model, pricing, recipe.lengths)
    return Choice(**candidate._asdict(), prediction=prediction), plan


def candidates(job: Job, pricing: Pricing) -> Iterator[Candidate]:
    """Every way to cut the job whose layers seem to fit, with its estimate.

    TP stays inside a node. Of the replicas there are as many as devices and batch allow.

    Raises UserError for unknown schedules.
    """
    shape, per_node = pricing.shape, pricing.cluster.cluster.gpus_per_node
    for schedule in job.schedules:
        placed(schedule, 1)
    for tp in degrees_of(shape):
        if per_node % tp:
            continue
        for pp in range(1, min(shape.layers, job.num_devices // tp) + 1):
            yield from _splits(job, pricing, tp, pp)


def _splits(job: Job, pricing: Pricing, tp: int, pp: int) -> Iterator[Candidate]:
    """Replicas, micro-batches and schedules at given degrees."""
    most = job.num_devices // (tp * pp)
    dp = next(dp for dp in range(min(most, job.global_batch), 0, -1) if not job.global_batch % dp)
    if dp < job.fewest_replicas:
        return
    # Automatic orders come when the rest is known, unless there is no other.
    schedules = [kind for kind in job.schedules if kind not in AUTOMATIC] or job.schedules
    per_replica = job.global_batch // dp
    sequences = 1
    while not per_replica % sequences and sequences * job.sequence_tokens <= MAX_TOKENS:
        for schedule in schedules:
            way = Candidate(0.0, tp, pp, dp, schedule, per_replica // sequences, sequences)
            num_stages = sum(map(len, placed(schedule, pp)))
            if num_stages <= pricing.shape.layers and _may_fit(way, job, pricing.shape):
                yield way._replace(estimate_s=_estimate_s(way, job, pricing))
        sequences *= 2


def _may_fit(way: Candidate, job: Job, shape: ModelShape) -> bool:
    """Whether the positions have room for all layers, as far as that can be told at once."""
    if job.memory_bytes is None or shape.layers < _FEWEST_LAYERS:
        return True
    batch = Batch(microbatches=way.microbatches, tokens=way.sequences * job.sequence_tokens)

    def sizes(first: int, last: int) -> StageFacts:
        return stage_facts(shape, batch, LayerRange(first, last), way.tp, 1, job.precision)

    one, two = sizes(1, 1), sizes(1, 2)
    stages = placed(way.schedule, way.pp)
    tables = {0: sizes(0, 0), sum(map(len, stages)) - 1: sizes(shape.layers - 1, shape.layers - 1)}
    num_layers = 0
    for position, held in enumerate(stages):
        in_flight = _least_in_flight(way, position)
        layer = _bytes_of(two, in_flight) - _bytes_of(one, in_flight)
        table = sum(
            _bytes_of(tables[stage], 1) - _bytes_of(one, 1) for stage in held if stage in tables
        )
        most = (job.memory_bytes - table) // layer
        if most < len(held):
            return False
        num_layers += most
    return num_layers >= shape.layers


def _bytes_of(sizes: StageFacts, in_flight: int) -> int:
    return sizes.state_bytes + in_flight * sizes.activation_bytes


def _least_in_flight(way: Candidate, position: int) -> int:
    """Micro-batches that a position has between F and B at once, or more."""
    if way.schedule in _NEED_ALL:
        return way.microbatches
    to_the_last = way.pp - position
    if len(placed(way.schedule, 1)[0]) > 1:
        # At least twice as many, but one, of one of its stages.
        to_the_last -= 1
    if way.schedule == "zb-h2":
        to_the_last += to_the_last - 1
    return max(1, min(way.microbatches, to_the_last))


def _estimate_s(way: Candidate, job: Job, pricing: Pricing) -> float:
    """By formula, for layers that can be split to any size.

    A position is busy for M (F + B + W). Before the last one starts and after it ends pass, with P
    positions of v stages, (P - 1) (F + B + W) / v where B and W are one (Narayanan et al. 2021)
    and (P - 1) times the larger of F and F + B - W where they are not (Qi et al. 2024); the step
    ends together, so the P - 1 forwards at the start can never be hidden.
    """
    lengths = Lengths.of([job.sequence_tokens] * way.sequences)
    shape, costs = pricing.shape, pricing.costs
    f, b, w = (
        (layer.seconds(lengths) * shape.layers + head.seconds(lengths)) / way.pp
        for layer, head in zip(costs.layer[way.tp], costs.head[way.tp], strict=True)
    )
    num_stages = len(placed(way.schedule, 1)[0])
    if way.schedule.startswith("zb"):
        fill_s = max(f, f + b - w) if way.schedule == "zb-h1" else f
    else:
        fill_s = f + b + w
    fill_s = (way.pp - 1) * (fill_s / num_stages + 2 * _hop_s(way, lengths, pricing))
    return way.microbatches * (f + b + w) + fill_s + _reduce_s(way, pricing)


def _hop_s(way: Candidate, lengths: Lengths, pricing: Pricing) -> float:
    """Of a tensor from the first position to the second."""
    if way.pp == 1:
        return 0.0
    first, second = (
        Group(
            replica=0,
            pp=pp,
            ranks=tuple(range(pp * way.tp, (pp + 1) * way.tp)),
            layers=(LayerRange(pp, pp),),
        )
        for pp in range(2)
    )
    return pricing.crossing(first, second, lengths.tokens).seconds


def _reduce_s(way: Candidate, pricing: Pricing) -> float:
    """Of the gradients of a position in the middle."""
    costs, shape = pricing.costs, pricing.shape
    num_bytes = shape.layers * costs.layer_parameter_bytes / (way.pp * way.tp)
    per_node = pricing.cluster.cluster.gpus_per_node
    return reduce_seconds(pricing.cluster, way.dp, num_bytes, per_node)


def _check_job(job: Job) -> None:
    for name in ("num_devices", "global_batch", "sequence_tokens", "fewest_replicas"):
        if getattr(job, name) < 1:
            raise UserError(f"{name} {getattr(job, name)}: must be at least 1")
    if job.sequence_tokens > MAX_TOKENS:
        raise UserError(
            f"sequences of {job.sequence_tokens} tokens are larger than any device; nearest "
            f"valid: {MAX_TOKENS}"
        )
    fewest, most = job.fewest_replicas, job.num_devices
    if fewest > most:
        raise UserError(f"{fewest} replicas on {most} devices; nearest valid: {most}")
    if all(job.global_batch % dp for dp in range(fewest, min(most, job.global_batch) + 1)):
        nearest = max(1, round(job.global_batch / fewest)) * fewest
        raise UserError(
            f"a batch of {job.global_batch} sequences has no equal shares for {fewest} to {most} "
            f"replicas; nearest valid: {nearest}"
        )
