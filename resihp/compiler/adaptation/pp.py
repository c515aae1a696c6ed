"""How many layers each position holds (section 6.2 of the paper), as an exact min-max.

All replicas have the same layers. What a stage takes is then either what its slowest replica
takes, or, if micro-batches move to where they run fastest, what all replicas take together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from resihp.compiler.adaptation.problems import capacity_of, in_flight_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.adaptation.tp import Members
from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.ir.model import Group, LayerRange, Op

__all__ = ["SHARES", "Share", "held_layers", "repartitioned"]

Share = Callable[[Sequence[float], int], float]
"""The time of a stage per micro-batch of each replica, from those of the replicas that have it and
the number of all."""


def slowest(seconds: Sequence[float], num_replicas: int) -> float:
    """Where each replica runs its own and those that have the stage share the rest evenly."""
    return max(seconds) * num_replicas / len(seconds)


def together(seconds: Sequence[float], num_replicas: int) -> float:
    """Where the fast replicas run more, so that all end at the same time."""
    return num_replicas / sum(1 / each for each in seconds)


SHARES: Mapping[str, Share] = {"slowest replica": slowest, "all replicas": together}
"""By what a decision calls them."""


def held_layers(situation: Situation) -> dict[int, tuple[LayerRange, ...]]:
    """Layers of each position of the plan before."""
    return {group.pp: group.layers for group in reversed(situation.previous.groups)}


def repartitioned(situation: Situation, members: Members, share: Share) -> list[LayerRange] | None:
    """Layers of each position for groups of `members`; None where memory holds too few.

    The time that is evened out is that of all micro-batches and the reduction of the gradients.
    Each stage has room for what the schedule keeps in flight there, or else for one micro-batch.
    For plans with one stage per position.
    """
    num_stages = situation.placement.num_stages
    holders: list[list[Group]] = [[] for _ in range(num_stages)]
    for (replica, pp), ranks in members.items():
        holders[pp].append(Group(replica=replica, pp=pp, ranks=ranks, layers=()))
    busy = situation.pricing.busy(chain.from_iterable(holders))
    stages = [
        _stage_time(situation, stage, holders[stage], share, busy) for stage in range(num_stages)
    ]
    current = [last - first + 1 for first, last in situation.placement.layers]
    num_layers = situation.previous.model.layers
    counts = partition(stages, num_layers, current)
    if counts is None:
        least = [
            each._replace(most_layers=_most_with(situation, stage, _least_tp(held), 1))
            for stage, (each, held) in enumerate(zip(stages, holders, strict=True))
        ]
        counts = partition(least, num_layers, current)
    return None if counts is None else ranges_of(counts)


def _stage_time(
    situation: Situation,
    stage: int,
    holders: Sequence[Group],
    share: Share,
    busy: Mapping[int, int],
) -> StageTime:
    """Time per layer, of the head and the tables, and the most layers that the holders can have."""
    last = situation.previous.model.layers - 1
    compute = _compute(situation, stage, holders, share)

    def seconds(first: int, end: int) -> float:
        layers = LayerRange(first, end)
        return compute(layers) + situation.pricing.reduce_s(holders, layers, busy)

    own = last if stage == situation.placement.num_stages - 1 else min(stage, 1, last)
    per_layer = seconds(0, 1) - seconds(0, 0) if last >= 2 else compute(LayerRange(0, 0))
    extra = max(0.0, seconds(own, own) - per_layer)
    return StageTime(per_layer, extra, _most_layers(situation, stage, _least_tp(holders)))


def _least_tp(holders: Sequence[Group]) -> int:
    return min(group.tp for group in holders)


def _compute(
    situation: Situation, stage: int, holders: Sequence[Group], share: Share
) -> Callable[[LayerRange], float]:
    """Seconds that the stage with some layers computes in an iteration."""
    pricing, batch = situation.pricing, situation.previous.batch
    num_replicas, slow = situation.previous.mesh.dp, situation.pricing.health.speed
    again = stage in situation.previous.recompute
    kinds: Counter[tuple[int, float]] = Counter()
    for group in holders:
        is_slow = any(rank in slow for rank in group.ranks)
        kinds[group.tp, pricing.speed(group) if is_slow else 1.0] += 1

    def seconds(layers: LayerRange) -> float:
        each = {
            (tp, speed): sum(
                cost.of(op).seconds(situation.lengths, speed)
                for cost in (pricing.stage(layers, tp, recomputes=again),)
                for op in (Op.F, Op.BW)
            )
            for tp, speed in kinds
        }
        times = [each[kind] for kind, count in kinds.items() for _ in range(count)]
        return batch.microbatches * share(times, num_replicas)

    return seconds


def _most_layers(situation: Situation, stage: int, tp: int) -> int:
    """The most layers that leave room for what the schedule keeps in flight, or else for one."""
    bounds = in_flight_of(situation.previous.schedule, situation.placement.num_stages)
    size = situation.previous.batch.microbatches
    wanted = 1 if bounds is None else min(bounds[stage], size)
    return max(
        _most_with(situation, stage, tp, wanted), min(1, _most_with(situation, stage, tp, 1))
    )


def _most_with(situation: Situation, stage: int, tp: int, in_flight: int) -> int:
    """The most layers of a stage that leave room for `in_flight` micro-batches; by bisection."""
    num_layers, num_stages = situation.previous.model.layers, situation.placement.num_stages
    again = stage in situation.previous.recompute

    def fits(count: int) -> bool:
        first = 0 if stage == 0 else num_layers - count if stage == num_stages - 1 else 1
        layers = LayerRange(first, first + count - 1)
        sizes = capacity_of(situation, layers, tp, recomputes=again)
        return in_flight * sizes.activation + sizes.held <= sizes.free

    low, high = 0, num_layers - num_stages + 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
