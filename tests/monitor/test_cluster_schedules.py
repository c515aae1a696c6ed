"""Whole clusters under random faults in virtual time: a sample of `make schedules`.

What must hold at every moment is checked in `sim_cluster`: one plan per generation, whoever dies;
one history of steps; one coordinator per term; nobody works on in two generations; every generation
begins with one version, which those who are counted on hold; no step is taken back that is there.
"""

from __future__ import annotations

import pytest
from sim_cluster import PLAIN
from sim_faults import FAMILIES, cluster_of, plague, run_schedule

NUM_SCHEDULES = 40
"""Of each family of the bare protocol."""
NUM_LONG = 8
"""Of each family whose jobs also have ranks that come back, saved versions or snapshots."""


def num_of(family: str) -> int:
    return NUM_SCHEDULES if FAMILIES[family].traits is PLAIN else NUM_LONG


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_schedule_ends_as_it_may(family: str):
    """[T6] [T9] [T10] Coordinators, monitors, ranks, nodes and links, in every phase."""
    for seed in range(num_of(family)):
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


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param("saves", 6, id="a reported step not taken back"),
        pytest.param("saves", 96, id="no plan to load where nobody new is lost"),
        pytest.param("state", 1004, id="deployed into a generation that went on"),
        pytest.param("state", 2036, id="told so, which was lost with a monitor"),
        pytest.param("saves_nodes", 5707, id="told to load, which only some had heard"),
        pytest.param("saves_nodes", 93207, id="given a place before it said it was ready"),
        pytest.param("snapshots_control", 245, id="all lost before anything was trained"),
        pytest.param("snapshots_control", 5752, id="asked a peer that had gone on"),
        pytest.param("terminated", 3832, id="a disk that takes too long"),
    ],
)
def test_schedules_that_found_faults_end_well(family: str, seed: int):
    """Each once broke an invariant, before what is mended now."""
    run_schedule(family, seed)


def test_the_schedules_with_state_reach_the_rare_cases():
    """[T10] [T11] [T13] [T15] Ranks come back, all holders of a shard are lost, all at once."""
    seen: set[str] = set()
    for family in ("returns_nodes", "saves", "saves_end", "snapshots_control", "state"):
        for seed in range(1000, 1000 + NUM_LONG):
            seen |= run_schedule(family, seed)[1]
    assert seen >= {
        "all holders of a shard lost",
        "goes_back",
        "rejoined",
        "respawned",
        "restored from a snapshot",
        "saved",
        "saved at the end",
        "supervisor restarted",
        "taken_back",
        "waits_for_restarts",
        "yielded",
    }


def test_a_schedule_is_a_function_of_its_seed():
    """So that a failure can be looked at again."""

    def story(seed: int) -> list[object]:
        cluster = cluster_of(seed)
        plague(cluster, FAMILIES["everything"].kinds, most=6)
        ends = cluster.run(3000.0)
        return [ends, cluster.time.now_s, sorted(cluster.rarities.items())]

    assert [story(seed) for seed in range(4)] == [story(seed) for seed in range(4)]
