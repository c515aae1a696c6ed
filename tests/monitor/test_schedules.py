"""The coordinator under thousands of random schedules of delays and deaths, in virtual time."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from plagues import LIMIT_S, check_end, plague, strike, world_of

from resihp.monitor.coordinator import Phase

NUM_SCHEDULES = 1200


@pytest.mark.parametrize("batch", range(6))
def test_deaths_at_any_moment_never_break_the_protocol(batch: int):
    """Kills and lost supervisors, up to four, in any phase: every step exactly once, one state."""
    for seed in range(batch * NUM_SCHEDULES // 6, (batch + 1) * NUM_SCHEDULES // 6):
        world = world_of(seed)
        plague(world, "ku", most=4)
        try:
            check_end(world, world.run(LIMIT_S).exit_code)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


def test_hung_and_mute_ranks_do_not_stop_the_others():
    """A hung executor is fenced, a mute supervisor evicted; the job goes on or says why not."""
    codes: list[int] = []
    for seed in range(150):
        world = world_of(seed)
        plague(world, "khs", most=3)
        end = world.run(LIMIT_S)
        codes.append(end.exit_code)
        if end.exit_code == 1:  # alone, a hang is not to be told from a slow step
            assert "no instruction finished" in end.reason or "times in a row" in end.reason
        else:
            check_end(world, end.exit_code)
    assert {0, 1} <= set(codes)


def test_every_wish_is_answered_once_whoever_dies():
    """Equal replicas, or a refusal: never nothing, also when it is asked for in a recovery."""
    seen: set[str] = set()
    for seed in range(300):
        world = world_of(seed)
        plague(world, "ku", most=4)
        for _ in range(3):
            world.after(world.random.uniform(0, 6), world.want_audit)
        world.run(LIMIT_S)
        assert not world.wanting, f"schedule {seed}: nobody answered"
        seen |= world.rarities
    assert seen >= {"Reply", "Refused", "asked again"}


def test_a_death_before_the_start_ends_the_job():
    """There is nothing to save, and the cause is usually the job file."""
    for seed in range(30):
        world = world_of(seed)
        world.after(0.0, lambda world=world: strike(world, "ku"))
        assert world.run(LIMIT_S).exit_code == 1
        assert world.phases == [Phase.STARTING, Phase.STOPPING]


def test_the_schedules_reach_the_rare_cases():
    """What the tests above are for does happen in them."""
    seen: set[str] = set()
    for seed in range(NUM_SCHEDULES // 4):
        world = world_of(seed)
        plague(world, "ku", most=4)
        world.run(LIMIT_S)
        phases = world.phases
        seen |= {f"{a.value}-{b.value}" for a, b in pairwise(phases)}
        seen |= {f"exit {world.desk.end.exit_code}"} if world.desk.end else set()
        generations = {ran for e in world.executors for _, ran in e.history}
        seen |= {"many generations"} if len(generations) > 2 else set()
        seen |= {"standby"} if any(g.plan.standby for g in world.generations.values()) else set()
        seen |= world.rarities
    assert seen >= {
        "opening-settling",
        "running-settling",
        "exit 0",
        "exit 4",
        "many generations",
        "standby",
        "rolled forward",
        "store host lost",
        "late report",
    }


def test_a_schedule_is_a_function_of_its_seed():
    """So that a failure can be looked at again."""

    def story(seed: int) -> list[str]:
        world = world_of(seed)
        plague(world, "ku", most=3)
        world.run(LIMIT_S)
        return [repr(action) for action in world.desk.actions]

    seeds = random.Random(0).sample(range(1000), 3)
    assert [story(seed) for seed in seeds] == [story(seed) for seed in seeds]
