"""The orders of several stages per position are those of torch's own schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from resihp.compiler import schedule_order
from resihp.compiler.schedules import placed

TORCH = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zbv": ScheduleZBVZeroBubble,
}
OP_NAMES = {"F": "F", "I": "B", "W": "W", "B": "BW"}
"""What torch's letters are called here."""


@contextmanager
def process_group_of(world: int) -> Iterator[None]:
    """A group whose other ranks do not exist; schedules ask it for its size only."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_order(kind: str, num_positions: int, num_microbatches: int, num_chunks: int):
    """Per position (operation, stage, micro-batch); None where torch refuses the numbers."""
    num_stages = num_positions * num_chunks
    with process_group_of(num_positions):
        stages = [
            PipelineStage(torch.nn.Identity(), stage, num_stages, torch.device("cpu"))
            for stage in placed(kind, num_positions, num_chunks)[0]
        ]
        try:
            schedule = TORCH[kind](stages, num_microbatches, loss_fn=torch.nn.MSELoss())
        except ValueError:
            return None
    return [
        [
            (OP_NAMES[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in schedule.pipeline_order[position]
            if action is not None
        ]
        for position in range(num_positions)
    ]


@pytest.mark.parametrize(
    ("kind", "num_chunks"),
    [("interleaved-1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("looped-bfs", 2),
     ("looped-bfs", 4), ("zbv", 2)],
)  # fmt: skip
@pytest.mark.parametrize("num_positions", [1, 2, 3, 4, 8])
def test_the_order_is_that_of_torch(kind, num_positions, num_chunks):
    """Whatever the number of micro-batches, where torch has an order for it."""
    known = 0
    for num_microbatches in (1, 2, 3, 4, 7, 8, 10, 16):
        theirs = torch_order(kind, num_positions, num_microbatches, num_chunks)
        if theirs is not None:
            ours = schedule_order(kind, num_positions, num_microbatches, num_chunks)
            assert [[(w.op.name, *w[1:]) for w in order] for order in ours] == theirs
            known += 1
    assert known >= 5
