"""Random faults at one coordinator and its ranks, and what must hold at the end."""

from __future__ import annotations

from coordinator_cases import job_of
from simulated import World

from resihp.monitor.coordinator import Phase

LIMIT_S = 400.0
SHAPES = [(2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3), (4, 1, 2)]


def world_of(seed: int) -> World:
    tp, pp, dp = SHAPES[seed % len(SHAPES)]
    return World(job_of(tp, pp, dp, steps=4), seed)


def strike(world: World, kinds: str) -> None:
    """One random fault at one random rank that is still there."""
    fault = {"k": world.kill, "u": world.unplug, "h": world.hang, "s": world.silence}
    alive = [executor.rank for executor in world.executors if not executor.dead]
    if alive:
        fault[world.random.choice(kinds)](world.random.choice(alive))


def plague(world: World, kinds: str, *, most: int) -> None:
    """Faults in random phases after the start, and right when a vote is complete."""
    left = world.random.randint(1, most)

    def on_phase(phase: Phase) -> None:
        nonlocal left
        if phase is Phase.STOPPING:
            return
        # The store's host is the lowest rank, so a random rank is it often enough.
        while left and world.random.random() < 0.4:
            left -= 1
            world.after(world.random.uniform(0, 0.4), lambda: strike(world, kinds))

    def on_vote() -> None:
        nonlocal left
        if left and world.random.random() < 0.2:
            left -= 1
            world.after(world.random.uniform(0, 0.06), lambda: strike(world, kinds))

    world.on_phase, world.on_vote = on_phase, on_vote


def check_end(world: World, code: int) -> None:
    """A finished job has all steps and one history; a lost one really cannot go on."""
    desk = world.desk
    records = desk.coordinator.records
    if code == 4:
        assert world.planner.refusals or not desk.alive
        return
    assert code == 0, desk.end
    assert [record.step for record in records] == list(range(world.num_steps))
    members = world.generations[desk.generation].plan.active_ranks
    assert len({world.executors[rank].history for rank in members}) == 1
    assert all(incident.resumed_s is not None for incident in desk.coordinator.incidents)
