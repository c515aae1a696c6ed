"""Which stages each lane holds, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resihp.ir.arrays import ABSENT, Arrays, Ints

__all__ = ["Held", "held_stages", "sole_stages", "stages_of"]


class Held(NamedTuple):
    """All (lane, stage), lane by lane, the stages of each ascending."""

    lane: Ints
    stage: Ints
    first: Ints
    """Entry of the first stage of each lane."""
    number: Ints
    """How many stages of its position come before each stage."""

    def entry(self, lane: Ints, stage: Ints) -> Ints:
        """Where a stage of a lane is."""
        return self.first[lane] + self.number[stage]


def held_stages(arrays: Arrays) -> Held:
    """The stages of all lanes."""
    lanes, stages = arrays.lanes, _at_positions(arrays)
    number = np.zeros(arrays.placement.num_stages, np.intp)
    for held in stages:
        number[list(held)] = np.arange(len(held))
    counts = np.array([len(held) for held in stages])[lanes.pp]
    every = [np.array(held, np.intp) for held in stages]
    positions: list[int] = lanes.pp.tolist()
    return Held(
        lane=np.repeat(np.arange(lanes.num), counts),
        stage=np.concatenate([every[pp] for pp in positions]),
        first=np.cumsum(counts) - counts,
        number=number,
    )


def sole_stages(arrays: Arrays) -> Ints:
    """The stage of each position that has one; ABSENT where there are several."""
    return np.array([held[0] if len(held) == 1 else ABSENT for held in _at_positions(arrays)])


def stages_of(arrays: Arrays, at: Ints) -> Ints:
    """Stages of some instructions; ABSENT where one is named in none of several stages."""
    named = arrays.table.stage[arrays.row[at]]
    if not (named == ABSENT).any():
        return named
    sole = sole_stages(arrays)[arrays.lanes.pp[arrays.lane[at]]]
    return np.where(named == ABSENT, sole, named)


def _at_positions(arrays: Arrays) -> list[tuple[int, ...]]:
    return [arrays.placement.stages.get(pp, ()) for pp in range(arrays.plan.mesh.pp)]
