"""Whole clusters under random faults in virtual time: a sample of `make schedules`.

What must hold at every moment is checked in `sim_cluster`: one plan per generation, whoever dies;
one history of steps; one coordinator per term; nobody works on in two generations.
"""

from __future__ import annotations

import pytest
from sim_faults import FAMILIES, cluster_of, plague, run_schedule

NUM_SCHEDULES = 40
"""Of each family."""


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_schedule_ends_as_it_may(family: str):
    """[T6] [T9] [T10] Coordinators, monitors, ranks, nodes and links, in every phase."""
    for seed in range(NUM_SCHEDULES):
        try:
            run_schedule(family, seed)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} of {family}: {error}") from error


def test_the_schedules_reach_the_rare_cases():
    """What the invariants are for does happen."""
    seen: set[str] = set()
    for family in ("monitors", "control", "everything", "partitions", "pauses"):
        for seed in range(1000, 1000 + NUM_SCHEDULES):
            seen |= run_schedule(family, seed)[1]
    assert seen >= {
        "adopted",
        "coordinator deposed",
        "end learned from a monitor",
        "leader paused",
        "monitor restarted",
        "node fenced itself",
        "node lost",
        "not_adopted",
        "one-way partition",
        "partition",
        "rolled forward",
        "stood_still",
        "supervisor reconnects",
    }


def test_a_schedule_is_a_function_of_its_seed():
    """So that a failure can be looked at again."""

    def story(seed: int) -> list[object]:
        cluster = cluster_of(seed)
        plague(cluster, FAMILIES["everything"].kinds, most=6)
        ends = cluster.run(3000.0)
        return [ends, cluster.time.now_s, sorted(cluster.rarities.items())]

    assert [story(seed) for seed in range(4)] == [story(seed) for seed in range(4)]
