"""Oobleck (SOSP 2023): pipelines of different depth, a template for each number of workers.

A pipeline that lost TP groups goes on with as many stages as it has groups, its layers split anew;
one that is too short for its memory borrows from the longest, or joins another one. Micro-batches
are dealt out so that b_i * T_i / S_i varies least, T_i being the time of a template and S_i its
stages. The plan language has one partition for all replicas, so there is a time and no plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from resihp.compiler.adaptation import TICK_S, Situation
from resihp.compiler.adaptation.problems import capacity_of, in_flight_of, splits_backward
from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.compiler.planner.carriers import even_shares
from resihp.compiler.planner.problem import Chunks, Problem, Replica
from resihp.compiler.policies.greyhound import greyhound
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import ONE_STAGE_ONLY, best_play, left_of, unchanged
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Group, LayerRange, Op

__all__ = ["oobleck", "oobleck_greyhound", "reductions"]

_Pipeline = list[Group]


def oobleck(situation: Situation) -> Outcome:
    """Templates for what is left; slow workers are taken for healthy."""
    return _reinstantiated(situation, "oobleck", knows_speed=False)


def oobleck_greyhound(situation: Situation) -> Outcome:
    """Oobleck strengthened by Greyhound: micro-batches by the true times of slow stages."""
    if situation.lost.isdisjoint(situation.previous.active_ranks):
        outcome = greyhound(situation)
        return Outcome(
            name="oobleck+greyhound",
            iteration_s=outcome.iteration_s,
            plan=outcome.plan,
            note=outcome.note,
        )
    return _reinstantiated(situation, "oobleck+greyhound", knows_speed=True)


def _reinstantiated(situation: Situation, name: str, *, knows_speed: bool) -> Outcome:
    if situation.lost.isdisjoint(situation.previous.active_ranks):
        return unchanged(situation, name)
    layout = left_of(situation)
    if layout is None:
        return Outcome.stops(name, "a stage is lost in every replica")
    if not situation.has_one_stage_each:
        return Outcome.stops(name, ONE_STAGE_ONLY)
    pipelines = _pipelines(situation, layout.groups)
    if pipelines is None:
        return Outcome.stops(name, "what is left of all pipelines cannot hold the model")
    placed = [_placed(situation, pipeline) for pipeline in pipelines]
    count = situation.previous.mesh.dp * situation.previous.batch.microbatches
    paces = [_pace(situation, pipeline, knows_speed=knows_speed) for pipeline in placed]
    shares = even_shares(paces, count)
    compute_s = max(
        _play_s(situation, pipeline, share) for pipeline, share in zip(placed, shares, strict=True)
    )
    depths = " ".join(f"{len(p)}x{share}" for p, share in zip(placed, shares, strict=True))
    return Outcome(
        name=name,
        iteration_s=compute_s + _finish_s(situation, placed),
        plan=None,
        note=f"pipelines of stages x micro-batches: {depths}",
    )


def _pipelines(situation: Situation, groups: Sequence[Group]) -> list[_Pipeline] | None:
    """The groups of each pipeline, long enough for its memory; None where none can be."""
    by_replica: defaultdict[int, _Pipeline] = defaultdict(list)
    for group in sorted(groups, key=lambda group: group.name):
        by_replica[group.replica].append(group)
    pipelines: list[_Pipeline] = list(by_replica.values())
    while True:
        short = [p for p in pipelines if _split(situation, p) is None]
        if not short:
            return pipelines
        needy = min(short, key=len)
        givers = [p for p in pipelines if p not in short and _split(situation, p[:-1]) is not None]
        if givers:
            needy.append(max(givers, key=len).pop())
            continue
        others = [p for p in pipelines if p is not needy]
        if not others:
            return None
        pipelines = others
        joined = min(pipelines, key=len)
        joined += needy
        del joined[situation.previous.model.layers :]


def _split(situation: Situation, pipeline: Sequence[Group]) -> list[LayerRange] | None:
    """The layers of each stage of a template, an exact min-max at healthy speed."""
    num_layers, num_stages = situation.previous.model.layers, len(pipeline)
    if not 1 <= num_stages <= num_layers:
        return None
    stages = [
        _stage_time(situation, stage, num_stages, group.tp) for stage, group in enumerate(pipeline)
    ]
    even = [
        (num_layers * (s + 1)) // num_stages - num_layers * s // num_stages
        for s in range(num_stages)
    ]
    counts = partition(stages, num_layers, even)
    return None if counts is None else ranges_of(counts)


def _stage_time(situation: Situation, stage: int, num_stages: int, tp: int) -> StageTime:
    last = situation.previous.model.layers - 1
    per_layer = _healthy_s(situation, LayerRange(0, 0), tp)
    extra = 0.0
    if stage == num_stages - 1 and last:
        extra = max(0.0, _healthy_s(situation, LayerRange(last, last), tp) - per_layer)
    return StageTime(per_layer, extra, _most_layers(situation, stage, num_stages, tp))


def _recomputes(situation: Situation) -> bool:
    """Whether templates do, whose stages are others than those of the plan before."""
    return bool(situation.previous.recompute)


def _healthy_s(situation: Situation, layers: LayerRange, tp: int) -> float:
    costs = situation.pricing.stage(layers, tp, recomputes=_recomputes(situation))
    return sum(costs.of(op).seconds(situation.lengths) for op in (Op.F, Op.BW))


def _most_layers(situation: Situation, stage: int, num_stages: int, tp: int) -> int:
    """Layers that leave room for what 1F1B keeps in flight; by bisection."""
    num_layers = situation.previous.model.layers
    in_flight = min(num_stages - stage, situation.previous.batch.microbatches)
    again = _recomputes(situation)
    low, high = 0, num_layers - num_stages + 1
    while low < high:
        count = (low + high + 1) // 2
        first = 0 if stage == 0 else num_layers - count if stage == num_stages - 1 else 1
        layers = LayerRange(first, first + count - 1)
        sizes = capacity_of(situation, layers, tp, recomputes=again)
        if in_flight * sizes.activation + sizes.held <= sizes.free:
            low = count
        else:
            high = count - 1
    return low


def _placed(situation: Situation, pipeline: Sequence[Group]) -> _Pipeline:
    """The groups with the layers of the template."""
    split = _split(situation, pipeline)
    assert split is not None, "pipelines are long enough"
    return [
        Group(replica=group.replica, pp=stage, ranks=group.ranks, layers=(layers,))
        for stage, (group, layers) in enumerate(zip(pipeline, split, strict=True))
    ]


def _pace(situation: Situation, pipeline: Sequence[Group], *, knows_speed: bool) -> float:
    """T / S of the template: T1 + T2 + T3, with the slowest stage k* and S stages."""
    pricing = situation.pricing
    seconds = [
        _healthy_s(situation, group.sole_layers, group.tp)
        / (pricing.speed(group) if knows_speed else 1.0)
        for group in pipeline
    ]
    slowest = max(range(len(seconds)), key=lambda stage: seconds[stage])
    steady = (2 * len(seconds) + slowest + 1) * seconds[slowest]
    return (sum(seconds) + steady + sum(seconds[slowest:])) / len(seconds)


def _play_s(situation: Situation, pipeline: Sequence[Group], num_microbatches: int) -> float:
    """Seconds of one pipeline's compute and transfers at the speeds of today."""
    pricing, plan = situation.pricing, situation.previous

    again = _recomputes(situation)

    def ticks(seconds: float) -> int:
        return max(1, round(seconds / TICK_S))

    def seconds(group: Group, op: Op) -> float:
        layers = group.sole_layers
        return pricing.compute_s(group, layers, op, situation.lengths, recomputes=again)

    chunks = tuple(
        Chunks(*(ticks(seconds(group, op)) for op in (Op.F, Op.B, Op.W))) for group in pipeline
    )
    edges = tuple(
        ticks(pricing.crossing(here, there, plan.batch.tokens).seconds)
        for here, there in pairwise(pipeline)
    )
    memory = tuple(
        capacity_of(situation, group.sole_layers, group.tp, recomputes=again) for group in pipeline
    )
    problem = Problem(
        replicas=(Replica(chunks, memory, edges),),
        num_microbatches=num_microbatches,
        crossing=edges,
        split=splits_backward(plan),
        in_flight=in_flight_of(plan.schedule, len(pipeline)),
    )
    return best_play(problem, {}).makespan * TICK_S


def _finish_s(situation: Situation, pipelines: Sequence[Sequence[Group]]) -> float:
    """The longest time that a stage reduces, and the optimizer's step."""
    pricing = situation.pricing
    steps = (pricing.step_s(group) for pipeline in pipelines for group in pipeline)
    return max(reductions(pricing, pipelines).values()) + max(steps)


def reductions(
    pricing: Pricing, pipelines: Sequence[Sequence[Group]]
) -> dict[tuple[int, ...], float]:
    """Seconds that each stage reduces, by its ranks: with other stages for each of its layers."""
    busy = pricing.busy(group for pipeline in pipelines for group in pipeline)
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for holders, layers in _shared(pipelines):
        seconds = pricing.reduce_s(holders, layers, busy)
        for group in holders:
            found[group.ranks] += seconds
    return found


def _shared(pipelines: Sequence[Sequence[Group]]) -> Iterator[tuple[list[Group], LayerRange]]:
    """Layers without a cut in any pipeline, each with the stage of every pipeline that has them."""
    firsts = {group.sole_layers.first for pipeline in pipelines for group in pipeline}
    end = pipelines[0][-1].sole_layers.last + 1
    for first, after in pairwise((*sorted(firsts), end)):
        holders = [
            group
            for pipeline in pipelines
            for group in pipeline
            if group.sole_layers.first <= first <= group.sole_layers.last
        ]
        yield holders, LayerRange(first, after - 1)
