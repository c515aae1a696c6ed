"""What both runtimes of `executor_speed.py` run: the model, the micro-batches, the schedules.

Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from resihp.config import ModelConfig
from resihp.executor.packing import IGNORED_TARGET, MicroBatch

MODEL = ModelConfig(
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=688,
    vocab_size=272,
)
SEED = 0
NUM_MICROBATCHES = 8


class Schedule(NamedTuple):
    """A schedule of torch's, by the name that the table gives it."""

    name: str
    torch_class: type
    stages_per_rank: int
    is_v: bool
    splits: bool
    """Whether its backward is split into I and W."""

    def stages_of(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        if self.stages_per_rank == 1:
            return (rank,)
        second = 2 * num_ranks - 1 - rank if self.is_v else num_ranks + rank
        return (rank, second)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1F1B", Schedule1F1B, 1, is_v=False, splits=False),
        Schedule("interleaved 1F1B", ScheduleInterleaved1F1B, 2, is_v=False, splits=False),
        Schedule("ZB, 1 stage a rank", ScheduleInterleavedZeroBubble, 1, is_v=False, splits=True),
        Schedule("ZB, 2 stages a rank", ScheduleInterleavedZeroBubble, 2, is_v=False, splits=True),
        Schedule("ZBV", ScheduleZBVZeroBubble, 2, is_v=True, splits=True),
    )
}


class Case(NamedTuple):
    """One row of the table."""

    schedule_name: str
    num_ranks: int
    num_tokens: int

    @property
    def schedule(self) -> Schedule:
        """What both run."""
        return SCHEDULES[self.schedule_name]

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.num_ranks * self.schedule.stages_per_rank

    def layers_of(self, stage: int) -> tuple[int, int]:
        """First and last layer of a stage."""
        size = MODEL.num_hidden_layers // self.num_stages
        return stage * size, (stage + 1) * size - 1

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """By rank."""
        return [self.schedule.stages_of(rank, self.num_ranks) for rank in range(self.num_ranks)]


def micro_batches(num_tokens: int) -> list[MicroBatch]:
    """Random bytes; every other micro-batch holds two documents."""
    generator = torch.Generator().manual_seed(SEED)
    batches: list[MicroBatch] = []
    for number in range(NUM_MICROBATCHES):
        ids_T = torch.randint(0, 256, (num_tokens + 1,), generator=generator)
        bounds = (0, num_tokens // 3, num_tokens) if number % 2 else (0, num_tokens)
        targets_T = ids_T[1:].clone()
        for _, end in pairwise(bounds):
            targets_T[end - 1] = IGNORED_TARGET
        batches.append(
            MicroBatch(
                sample_id=number,
                input_ids_T=ids_T[:-1].clone(),
                targets_T=targets_T,
                position_ids_T=_positions(bounds),
                cu_seqlens=bounds,
                num_targets=num_tokens - len(bounds) + 1,
            )
        )
    return batches


def _positions(bounds: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)])


def loss_scale(batches: list[MicroBatch]) -> float:
    """One over the number of targets of the iteration."""
    return 1.0 / sum(batch.num_targets for batch in batches)
