"""Which version survivors settle on, and which differences between replicas are found."""

from __future__ import annotations

import pytest
from coordinator_cases import record_of, settled
from hypothesis import given
from hypothesis import strategies as st

from resihp.monitor.settlement import Settlement, differing_shards, newest_version
from resihp.wire.messages import Joined, Settled


def joined(**hashes: str) -> Joined:
    return Joined(generation=1, hashes=hashes, moved_bytes=0)


def test_before_the_first_step_there_is_nothing_to_settle():
    """Version 0 has no record."""
    states = [settled(1), settled(1)]
    assert newest_version(states, None) == Settlement(version=0, updates=0, record=None)


def test_ranks_that_agree_stay_where_they_are():
    """The common case: everybody was inside the same iteration."""
    found = newest_version([settled(2, 5), settled(2, 5)], record_of(4))
    assert found == Settlement(version=5, updates=5, record=record_of(4))


@pytest.mark.parametrize(
    "ahead", [settled(2, 6), settled(2, 5, voted=6)], ids=["applied it", "saw the vote"]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_rank_that_knows_the_vote_takes_all_others_along(ahead: Settled, place: int):
    """Its vote proves that all the others hold the gradients, in whatever order they report."""
    states = [settled(2, 5), settled(2, 5)]
    states.insert(place, ahead)
    expected = Settlement(version=6, updates=6, record=record_of(5))
    assert newest_version(states, record_of(4)) == expected


@pytest.mark.parametrize("voted_only", [True, False])
def test_a_skipped_step_is_a_version_without_an_update(voted_only: bool):
    """Rolling forward over it changes the number of steps, not that of updates."""
    record = record_of(5, skipped=True)
    version, updates = (5, 5) if voted_only else (6, 5)
    ahead = settled(2, version, voted=6, updates=updates, record=record)
    assert newest_version([settled(2, 5), ahead], None) == Settlement(
        version=6, updates=5, record=record
    )


def test_a_reported_step_counts_though_no_survivor_knows_it():
    """Whoever reported it is lost, but had the contribution of all."""
    found = newest_version([settled(2, 5), settled(2, 5)], record_of(5, 9.0))
    assert found == Settlement(version=6, updates=6, record=record_of(5, 9.0))


def test_a_standby_rank_decides_nothing():
    """It still has the numbers of the generation that parked it."""
    states = [settled(3, 2), settled(3, 8, voted=9), settled(3, 2)]
    assert newest_version(states, record_of(7)).version == 9
    assert newest_version([settled(3, 2)], record_of(7)).version == 2


@given(
    st.lists(st.tuples(st.sampled_from([(5, 5), (5, 6), (6, 6)]), st.booleans()), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_every_real_mixture_settles_where_all_can_follow(
    kinds: list[tuple[tuple[int, int], bool]], reported: bool, skipped: bool
):
    """Of ranks inside one iteration the settled version is 6 exactly where somebody knew."""
    record = record_of(5, skipped=skipped)
    states = [
        settled(
            2,
            version,
            voted=voted,
            updates=5 if version == 5 or skipped else 6,
            record=record if voted == 6 else record_of(4),
        )
        for (version, voted), _ in kinds
    ]
    knows = reported or any(voted == 6 for (_, voted), _ in kinds)
    found = newest_version(states, record if reported else record_of(4))
    assert found.version == (6 if knows else 5)
    assert found.updates == (6 if knows and not skipped else 5)
    assert found.record == (record if knows else record_of(4))


def test_equal_replicas_do_not_differ():
    """Ranks of other shards have other names; a standby rank has none."""
    assert (
        differing_shards({0: joined(a="1"), 1: joined(b="2"), 2: joined(a="1"), 3: joined()}) == ""
    )


def test_a_difference_names_the_shard_and_both_ranks():
    """The first one in order of rank."""
    found = differing_shards({2: joined(a="1", b="3"), 0: joined(a="1", b="2"), 1: joined(c="1")})
    assert found == "b on ranks 0 and 2"
