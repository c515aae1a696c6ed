"""Which version survivors settle on, and which differences between replicas are found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator_cases import job_of, record_of, settled
from hypothesis import given
from hypothesis import strategies as st

from resihp.ir.reshard import layers_of
from resihp.monitor.planner import Planner
from resihp.monitor.settlement import Settlement, differing_shards, newest_version, settle
from resihp.wire.messages import Joined, Sealed, Settled, StepRecord


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


# --- with snapshots


PLAN = Planner(job_of(2, 2, 2)).initial().plan
"""Ranks 0 and 1 hold layer 0 of replica 0, 2 and 3 layer 1; ranks 4 to 7 are replica 1."""
BASE = 3


def sealed(rank: int, version: int, generation: int = BASE, updates: int | None = None) -> Sealed:
    count = version if updates is None else updates
    return Sealed(rank=rank, generation=generation, version=version, updates=count)


def state(
    version: int, *snapshots: Sealed, voted: int | None = None, layouts: tuple[int, ...] = (BASE,)
) -> Settled:
    told = settled(5, version, voted=voted)
    return msgspec.structs.replace(told, layouts=layouts, snapshots=snapshots)


def records_to(version: int) -> list[StepRecord]:
    return [record_of(step) for step in range(version)]


def test_without_a_loss_of_a_whole_shard_snapshots_change_nothing():
    """A live replica comes first."""
    states = {rank: state(5, *(sealed(r, 4) for r in range(8))) for rank in range(1, 8)}
    found = settle(BASE, PLAN, states, records_to(5))
    assert found is not None
    assert (found.version, found.updates, found.record) == (5, 5, record_of(4))


def test_both_holders_of_a_shard_are_lost_and_a_snapshot_of_one_is_newest():
    """Nobody goes back: the lost ranks had sealed this version before they died."""
    seen = [sealed(0, 4), sealed(0, 5), sealed(4, 4)]
    states = {rank: state(5, *seen) for rank in (1, 2, 3, 5, 6, 7)}
    found = settle(BASE, PLAN, states, records_to(5))
    assert found is not None
    assert (found.version, found.snapshots) == (5, {0: (1, 2, 3, 5, 6, 7)})


def test_all_go_back_where_the_newest_version_of_a_shard_was_never_sealed():
    """Each to its own snapshot; the lost one is read by those of its node."""
    own = {rank: (sealed(rank, 4), sealed(rank, 5)) for rank in (1, 2, 3, 5, 6, 7)}
    states = {rank: state(5, *own[rank]) for rank in (2, 3, 5, 6, 7)}
    states[1] = state(5, *own[1], sealed(0, 4))
    found = settle(BASE, PLAN, states, records_to(5))
    assert found is not None
    assert (found.version, found.updates, found.record) == (4, 4, record_of(3))
    assert found.snapshots == {0: (1,)}


def test_snapshots_of_another_layout_are_no_source():
    """Not an older one, nor one that not everybody joined."""
    others = [sealed(0, 5, generation) for generation in (2, 4)]
    states = {rank: state(5, sealed(rank, 5), *others) for rank in (1, 2, 3, 5, 6, 7)}
    assert settle(BASE, PLAN, states, records_to(5)) is None


def test_who_cannot_go_back_keeps_all_where_they_are():
    """Then nothing but a checkpoint has a version of everything."""
    states = {rank: state(5, sealed(rank, 4), sealed(0, 4)) for rank in (1, 2, 3, 5, 6, 7)}
    states[7] = state(5, sealed(0, 4))
    assert settle(BASE, PLAN, states, records_to(5)) is None


def test_ranks_that_were_started_again_hold_their_own_snapshots():
    """All executors of a job were killed at once, in the middle of a copy."""
    newest = {rank: 5 if rank in (2, 6) else 4 for rank in range(8)}
    states = {
        rank: state(0, sealed(rank, 4), sealed(rank, newest[rank]), layouts=(0,))
        for rank in range(8)
    }
    found = settle(BASE, PLAN, states, records_to(5))
    assert found is not None
    assert (found.version, found.snapshots, found.empty) == (4, {}, ())


def test_a_rank_that_was_started_again_without_a_snapshot_is_empty():
    """Its replica is the source, and it counts as lost."""
    states = {rank: state(5) for rank in range(1, 8)} | {0: state(0, layouts=(0,))}
    found = settle(BASE, PLAN, states, records_to(5))
    assert found is not None
    assert (found.version, found.empty) == (5, (0,))


@pytest.mark.parametrize("last", [None, 5])
def test_a_snapshot_after_what_live_holders_and_records_know_is_no_source(last: int | None):
    """[T9] Also where all could follow it: they went back from that version once."""
    seen = [sealed(rank, version) for rank in range(8) for version in (5, 6)]
    states = {rank: state(5, *seen) for rank in range(1, 8)}
    found = settle(BASE, PLAN, states, records_to(5), last)
    assert found is not None
    assert (found.version, found.record) == (5, record_of(4))


def test_nothing_counts_after_the_version_that_was_gone_on_from():
    """[T9] A rank that was not told of it is ahead, and a snapshot that came late is with it."""
    own = {rank: (sealed(rank, 5), sealed(rank, 6)) for rank in (1, 2, 3, 5, 6, 7)}
    late = sealed(0, 5), sealed(0, 6)
    states = {rank: state(5, *own[rank], *late) for rank in (1, 2, 3, 5, 6)}
    states[7] = state(6, *own[7])
    at_first = settle(BASE, PLAN, states, records_to(5))
    assert at_first is not None
    assert at_first.version == 6
    found = settle(BASE, PLAN, states, records_to(5), 5)
    assert found is not None
    assert (found.version, found.updates, found.record) == (5, 5, record_of(4))


def test_all_that_were_started_again_begin_where_the_others_went_on():
    """[T9] [T14] Those of one replica have a version that the job went on without."""
    ahead, behind = range(4), range(4, 8)
    states = {r: state(0, sealed(r, 5), sealed(r, 6), layouts=(0,)) for r in ahead}
    states |= {r: state(0, sealed(r, 6), layouts=(0,)) for r in behind}
    at_first = settle(BASE, PLAN, states, records_to(5))
    assert at_first is not None
    assert at_first.version == 6
    found = settle(BASE, PLAN, states, records_to(5), 5)
    assert found is not None
    assert (found.version, found.empty) == (5, (4, 5, 6, 7))


versions = st.integers(3, 6)
tellings = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["lost", "live", "again"]),
        "at": st.sampled_from([(5, 5), (5, 6), (6, 6)]),
        "own": st.sets(versions, max_size=2),
        "readable": st.sets(st.tuples(st.integers(0, 7), versions), max_size=4),
    }
)


def slowly_settled(
    states: dict[int, Settled], reported: int, last: int | None
) -> tuple[int, set[int]] | None:
    """Version and holders by trying all: every shard, every rank, every version."""
    live = {r for r, s in states.items() if BASE in s.layouts}
    newest = max([reported, *(max(states[r].version, states[r].voted) for r in live)])
    order = list(range(10, -1, -1))
    if not live:
        order.sort(key=lambda v: -sum(sealed(r, v) in s.snapshots for r, s in states.items()))
    for version in order:
        if (live and version > newest) or (last is not None and version > last):
            continue
        holders, is_possible = set[int](), True
        for rank, told in states.items():
            own = sealed(rank, version) in told.snapshots
            if rank in live:
                can = version in (newest, told.version) or own
                is_possible = is_possible and can
            else:
                can = own
            if can:
                holders.add(rank)
        readable = {
            r for r in range(8) for s in states.values() if sealed(r, version) in s.snapshots
        }
        has_all = all(
            any(
                rank in (holders | readable)
                and layer in layers_of(group)
                and index * 2 // group.tp <= chunk < (index + 1) * 2 // group.tp
                for group in PLAN.groups
                for index, rank in enumerate(group.ranks)
            )
            for layer in (0, 1)
            for chunk in (0, 1)
        )
        told_of = (
            bool(live and version == newest)
            or bool(readable)
            or any(states[r].version == version for r in live)
        )
        if is_possible and has_all and told_of:
            return version, holders
    return None


@given(
    st.lists(tellings, min_size=8, max_size=8),
    st.sampled_from([5, 6]),
    st.sampled_from([None, 4, 5, 6]),
)
def test_the_newest_version_with_all_sources_is_found(
    told: list[dict[str, Any]], reported: int, last: int | None
):
    """[T14] As by trying every version, shard and rank."""
    states = dict[int, Settled]()
    for rank, each in enumerate(told):
        if each["kind"] == "lost":
            continue
        seen = {sealed(r, v) for r, v in each["readable"]} | {sealed(rank, v) for v in each["own"]}
        version, voted = each["at"] if each["kind"] == "live" else (0, 0)
        layouts = (BASE,) if each["kind"] == "live" else (0,)
        states[rank] = state(version, *sorted(seen, key=repr), voted=voted, layouts=layouts)
    known = max([reported, *(each.version for each in states.values())])
    found = settle(BASE, PLAN, states, records_to(known), last) if states else None
    expected = slowly_settled(states, known, last)
    if found is None:
        assert expected is None
        return
    assert expected is not None
    version, holders = expected
    assert found.version == version
    assert set(found.empty) == {r for r, s in states.items() if BASE not in s.layouts} - holders
    for rank, readers in found.snapshots.items():
        assert rank not in holders
        assert all(sealed(rank, version) in states[reader].snapshots for reader in readers)
