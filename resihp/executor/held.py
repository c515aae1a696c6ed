"""What a rank still has of an interrupted iteration: gradient sums, losses, sample ids.

A micro-batch whose weight gradients are complete here, at a stage, is in one of the stage's sums.
Sums cannot be taken apart again: the micro-batches of one are kept together or redone together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from resihp.wire.messages import HeldSums, KeptSums

if TYPE_CHECKING:
    from torch import Tensor

    from resihp.executor.model import Key

__all__ = ["Held", "Keep", "Loss", "SumSet"]


class SumSet(NamedTuple):
    """The sum of the gradients of some micro-batches at one stage, fp32 in local shapes."""

    keys: frozenset[Key]
    sums: Mapping[str, Tensor]


class Loss(NamedTuple):
    """Of one micro-batch, on the rank that brings it to the vote."""

    value: float
    sample: int
    """Id of the sample that was read."""


class Held(NamedTuple):
    """On one rank, of iteration `step`."""

    step: int
    sums: Mapping[int, Sequence[SumSet]]
    """By stage."""
    losses: Mapping[Key, Loss]

    def report(self, num_microbatches: int) -> tuple[HeldSums, ...]:
        """For the coordinator; micro-batches by number in the global batch."""
        return tuple(
            HeldSums(
                stage=stage,
                sets=tuple(
                    tuple(sorted(home * num_microbatches + number for home, number in each.keys))
                    for each in sets
                ),
            )
            for stage, sets in sorted(self.sums.items())
            if sets
        )

    def only(self, keep: Collection[Key]) -> Held:
        """What is left where only `keep` is kept: sums with anything else in them are dropped."""
        return Held(
            self.step,
            {
                stage: tuple(each for each in sets if each.keys <= set(keep))
                for stage, sets in self.sums.items()
            },
            {key: loss for key, loss in self.losses.items() if key in keep},
        )


class Keep:
    """Which micro-batches of iteration `step` are kept, and what this rank has of them."""

    def __init__(
        self,
        step: int,
        kept: Sequence[KeptSums],
        held: Held | None,
        num_microbatches: int,
    ) -> None:
        """`kept` says who has what, of all stages; `held` is what this rank has."""
        self.step = step
        self._kept = {
            (each.stage, each.replica): frozenset(
                divmod(number, num_microbatches) for number in each.microbatches
            )
            for each in kept
        }
        keep = frozenset[tuple[int, int]]().union(*self._kept.values())
        mine = held if held is not None and held.step == step else Held(step, {}, {})
        self.held = mine.only(keep)

    def at(self, stage: int, replica: int) -> frozenset[Key]:
        """What the group of `replica` at `stage` brings along."""
        return self._kept.get((stage, replica), frozenset())

    def check(self, stages: Collection[int], replica: int) -> None:
        """That this rank, of the group of `replica`, has what all others count on."""
        for stage in stages:
            has = frozenset[tuple[int, int]]().union(
                *(each.keys for each in self.held.sums.get(stage, ()))
            )
            wanted = self.at(stage, replica)
            assert has == wanted, f"stage {stage}: holds {sorted(has)}, is to keep {sorted(wanted)}"
