"""Which stage stands where: numbered by layers, whatever the groups say it is called.

The ranges of layers of all groups, in ascending order, are the stages 0 .. S-1. All groups of a
position hold the same ones (RHP204); where a faulty plan disagrees, the first group counts.
"""

from __future__ import annotations

from typing import NamedTuple

from resihp.ir.model import Instr, LayerRange, Plan

__all__ = ["Placement", "placement_of"]


class Placement(NamedTuple):
    """Stages of a plan."""

    layers: tuple[LayerRange, ...]
    """Of each stage."""
    pp: tuple[int, ...]
    """Position of each stage in the pipeline."""
    stages: dict[int, tuple[int, ...]]
    """Stages of each position, ascending: one per entry of `Group.layers`."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.layers)

    def stage_of(self, pp: int, instr: Instr) -> int | None:
        """The stage that `instr` of a stream at `pp` belongs to; None for STEP.

        None too where a faulty instruction names no stage, or one that is not at `pp`.
        """
        held = self.stages.get(pp, ())
        if not instr.op.has_stage:
            return None
        if instr.stage is None:
            return held[0] if len(held) == 1 else None
        return instr.stage if self.is_at(instr.stage, pp) else None

    def is_at(self, stage: int, pp: int) -> bool:
        """Whether there is such a stage and it stands at `pp`."""
        return 0 <= stage < len(self.pp) and self.pp[stage] == pp


def placement_of(plan: Plan) -> Placement:
    """The stages of `plan` and where they are."""
    held: dict[int, tuple[LayerRange, ...]] = {}
    for group in plan.groups:
        held.setdefault(group.pp, group.layers)
    placed = sorted((layers, pp) for pp, ranges in held.items() for layers in ranges)
    stages: dict[int, list[int]] = {pp: [] for pp in held}
    for stage, (_, pp) in enumerate(placed):
        stages[pp].append(stage)
    return Placement(
        layers=tuple(layers for layers, _ in placed),
        pp=tuple(pp for _, pp in placed),
        stages={pp: tuple(numbers) for pp, numbers in stages.items()},
    )
