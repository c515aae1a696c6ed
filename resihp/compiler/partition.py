"""How many layers each stage holds so that the slowest stage is as fast as can be.

The time of a stage grows with its layers, so giving one layer after the other to the stage that
ends up fastest is exact: no other partition has a smaller largest time. Memory bounds the layers
of a stage from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resihp.ir.model import LayerRange

__all__ = ["StageTime", "partition", "ranges_of"]


class StageTime(NamedTuple):
    """What a stage takes for one micro-batch, and how much it can hold."""

    per_layer: float
    extra: float
    """What does not depend on its layers, such as the head on the last stage."""
    most_layers: int

    def of(self, num_layers: int) -> float:
        """Time with `num_layers` layers."""
        return self.extra + num_layers * self.per_layer


def partition(
    stages: Sequence[StageTime], num_layers: int, current: Sequence[int]
) -> list[int] | None:
    """Layers of each stage, each at least one; None where memory holds too few.

    `current` is the partition so far, of as many layers.

    Of all partitions with the smallest largest time, one near `current` is chosen: stages that
    hold more than that time allows give the excess away, the rest stays.
    """
    if num_layers < len(stages) or sum(max(stage.most_layers, 0) for stage in stages) < num_layers:
        return None
    if any(stage.most_layers < 1 for stage in stages):
        return None
    bound = max(
        stage.of(count) for stage, count in zip(stages, _greedy(stages, num_layers), strict=True)
    )
    limits = [_most_within(stage, bound) for stage in stages]
    counts = [min(have, limit) for have, limit in zip(current, limits, strict=True)]
    for _ in range(num_layers - sum(counts)):
        open_stages = [s for s in range(len(stages)) if counts[s] < limits[s]]
        best = min(open_stages, key=lambda s: (stages[s].of(counts[s] + 1), s))
        counts[best] += 1
    return counts


def _greedy(stages: Sequence[StageTime], num_layers: int) -> list[int]:
    counts = [1] * len(stages)
    for _ in range(num_layers - len(stages)):
        open_stages = [s for s in range(len(stages)) if counts[s] < stages[s].most_layers]
        best = min(open_stages, key=lambda s: (stages[s].of(counts[s] + 1), s))
        counts[best] += 1
    return counts


def _most_within(stage: StageTime, bound: float) -> int:
    """The most layers whose time is at most `bound`; at least one."""
    count = max(1, int((bound - stage.extra) / stage.per_layer)) if stage.per_layer > 0 else 1 << 30
    while count > 1 and stage.of(count) > bound:
        count -= 1
    while stage.of(count + 1) <= bound and count < stage.most_layers:
        count += 1
    return min(count, stage.most_layers)


def ranges_of(counts: Sequence[int]) -> list[LayerRange]:
    """Contiguous ranges of as many layers."""
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [
        LayerRange(first, first + count - 1) for first, count in zip(firsts, counts, strict=True)
    ]
