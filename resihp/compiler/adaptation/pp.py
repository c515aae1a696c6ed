"""How many layers each position holds (section 6.2 of the paper), as an exact min-max.

All replicas have the same layers. What a stage takes is then either what its slowest replica
takes, or, if micro-batches move to where they run fastest, what all replicas take together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from resihp.compiler.adaptation.problems import capacity_of, in_flight_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.adaptation.tp import Members
from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.ir.model import LayerRange, Op

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

    For plans with one stage per position.
    """
    kinds = _kinds(situation, members)
    num_stages = situation.placement.num_stages
    stages = [_stage_time(situation, stage, kinds[stage], share) for stage in range(num_stages)]
    current = [last - first + 1 for first, last in situation.placement.layers]
    counts = partition(stages, situation.previous.model.layers, current)
    return None if counts is None else ranges_of(counts)


_Kinds = dict[tuple[int, float], int]
"""How many groups there are of each degree and speed."""


def _kinds(situation: Situation, members: Members) -> list[_Kinds]:
    kinds: list[_Kinds] = [{} for _ in range(situation.placement.num_stages)]
    slow = situation.pricing.health.speed
    for place, ranks in members.items():
        speed = 1.0
        if any(rank in slow for rank in ranks):
            speed = min(map(situation.speed_of, ranks))
        kind = len(ranks), speed
        kinds[place.pp][kind] = kinds[place.pp].get(kind, 0) + 1
    return kinds


def _stage_time(situation: Situation, stage: int, kinds: _Kinds, share: Share) -> StageTime:
    """Time per layer, of the head, and the most layers that the smallest group can hold."""
    last = situation.previous.model.layers - 1
    num_replicas = situation.previous.mesh.dp

    def shared(layers: LayerRange) -> float:
        seconds = [
            sum(
                situation.pricing.stage(layers, tp).of(op).seconds(situation.lengths, speed)
                for op in (Op.F, Op.BW)
            )
            for (tp, speed), count in kinds.items()
            for _ in range(count)
        ]
        return share(seconds, num_replicas)

    per_layer = shared(LayerRange(0, 0)) if last > 0 else 0.0
    extra = 0.0
    if stage == situation.placement.num_stages - 1:
        extra = max(0.0, shared(LayerRange(last, last)) - per_layer)
    least_tp = min(tp for tp, _ in kinds)
    return StageTime(per_layer, extra, _most_layers(situation, stage, least_tp))


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

    def fits(count: int) -> bool:
        first = 0 if stage == 0 else num_layers - count if stage == num_stages - 1 else 1
        sizes = capacity_of(situation, LayerRange(first, first + count - 1), tp)
        return in_flight * sizes.activation + sizes.held <= sizes.free

    low, high = 0, num_layers - num_stages + 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
