"""Ranks that leave and come back under random schedules of delays and deaths, in virtual time."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_cases import job_of
from plagues import LIMIT_S, check_end, plague
from simulated import World

from resihp.config import RejoinConfig

SHAPES = [(1, 2, 2), (2, 1, 2), (1, 1, 3)]
NUM_STEPS = 14
NUM_SCHEDULES = 240


def world_of(seed: int) -> World:
    tp, pp, dp = SHAPES[seed % len(SHAPES)]
    rejoin = RejoinConfig(restarts=3, good_iterations=1)
    world = World(msgspec.structs.replace(job_of(tp, pp, dp, NUM_STEPS), rejoin=rejoin), seed)
    world.returns = seed % 2 == 0
    return world


@pytest.mark.parametrize("batch", range(4))
def test_ranks_that_leave_and_come_back_never_break_the_protocol(batch: int):
    """[T10] Every step exactly once and one history on all members, whoever comes and goes."""
    rarities: set[str] = set()
    num_back = 0
    size = NUM_SCHEDULES // 4
    for seed in range(batch * size, (batch + 1) * size):
        world = world_of(seed)
        plague(world, "ku", most=4)
        try:
            check_end(world, world.run(LIMIT_S).exit_code)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        rarities |= world.rarities
        num_back += sum(
            1 for action in world.desk.actions if getattr(action, "kind", "") == "rejoined"
        )
    assert {"yielded", "respawned"} <= rarities
    assert num_back > size // 8, "ranks do come back"
