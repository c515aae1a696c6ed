"""Replicas that do the same up to names: found, and lowered once for all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plan_of, streams_of
from schedule_cases import random_schedule
from slow_lower import slow_lower

from resihp.compiler import SCHEDULES, facts_of, lower, ordered, spread_work
from resihp.compiler.capacity import oversized
from resihp.compiler.kinds import first_of_each, for_all, kinds_of
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Group, Plan
from resihp.ir.verify.memory import peaks_of


def spread(schedule: str, dp: int, gone: set[int], microbatches: int, smaller: set[int]) -> Plan:
    """A schedule without the replicas `gone`; the first group of some others has one rank."""
    healthy = plan_of(tp=2, pp=2, dp=dp, microbatches=microbatches, schedule=schedule)
    groups = tuple(
        msgspec.structs.replace(group, ranks=group.ranks[:1])
        if group.pp == 0 and group.replica in smaller
        else group
        for group in healthy.groups
        if group.replica not in gone
    )
    left = [replica for replica in range(dp) if replica not in gone]
    plan = msgspec.structs.replace(healthy, groups=groups, streams=())
    return ordered(plan, schedule, spread_work(left, dp, microbatches))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 6),
    st.sets(st.integers(1, 5)),
    st.integers(1, 4),
    st.sets(st.integers(0, 5)),
    st.sampled_from(["edge", "rank"]),
)
def test_one_of_each_kind_is_enough(schedule, dp, gone, microbatches, smaller, transport):
    """Lowering all replicas one by one gives the same streams."""
    plan = spread(schedule, dp, gone, microbatches, smaller)
    plan = msgspec.structs.replace(plan, transport=transport)
    assert streams_of(lower(plan)) == streams_of(slow_lower(plan, transport))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["edge", "rank"]))
def test_replicas_that_share_micro_batches_are_lowered_together(seed, transport):
    """Random placings, migrations and degrees."""
    plan = msgspec.structs.replace(random_schedule(seed), transport=transport)
    assert streams_of(lower(plan)) == streams_of(slow_lower(plan, transport))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.sets(st.integers(1, 3)),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())),
)
def test_one_of_each_kind_is_enough_whatever_is_cut(schedule, gone, cut):
    """Replicas with other choices are of another kind."""

    def scatter(sender: Group, receiver: Group) -> bool:
        return (sender.replica, receiver.replica, sender.pp < receiver.pp) in cut

    plan = spread(schedule, 4, gone, 3, set())
    assert streams_of(lower(plan, scatter=scatter)) == streams_of(slow_lower(plan, "edge", scatter))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.sets(st.integers(1, 5)), st.integers(1, 5))
def test_memory_is_that_of_each_replica_by_itself(schedule, dp, gone, microbatches):
    """Replicas of a kind may differ in their sums of gradients, which follow the numbers."""
    plan = lower(spread(schedule, dp, gone, microbatches, set()))
    peaks = peaks_of(lanes_of(plan), facts_of(plan))
    found = oversized(msgspec.structs.replace(plan, memory_bytes=1))
    assert {excess.group.name: excess.needed_bytes for excess in found} == peaks


def test_replicas_that_run_as_many_foreign_micro_batches_are_of_one_kind():
    """One of 8 is gone; its 4 micro-batches go to 4 of the 7 others."""
    plan = spread("1f1b", 8, {3}, 4, set())
    assert sorted(len(kind.replicas) for kind in kinds_of(plan)) == [3, 4]


def test_a_healthy_job_has_one_kind():
    """Whatever the number of replicas."""
    (kind,) = kinds_of(plan_of(dp=5))
    assert (kind.first, sorted(kind.replicas)) == (0, [0, 1, 2, 3, 4])


def test_a_replica_with_another_degree_is_of_another_kind():
    """Its transfers are cut, those of the others are not."""
    kinds = kinds_of(spread("zb-h1", 4, set(), 4, {2}))
    assert [list(kind.replicas) for kind in kinds] == [[0, 1, 3], [2]]


def test_replicas_that_run_parts_of_one_micro_batch_are_like_no_other():
    """Replica 0 runs stage 1 of micro-batch 0@1; replicas 2 and 3 the same of each other's."""
    plan = spread("1f1b", 4, set(), 1, set())
    streams = [
        msgspec.structs.replace(
            stream,
            replicas=(replica,),
            body=tuple(
                msgspec.structs.replace(instr, home=replica ^ 1 if stream.pp else None)
                for instr in stream.body
            ),
        )
        for stream in plan.streams
        for replica in stream.replicas
    ]
    swapped = msgspec.structs.replace(plan, streams=tuple(streams))
    assert [list(kind.replicas) for kind in kinds_of(swapped)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("gone", [set(), {0}, {1, 2}])
def test_taking_one_of_each_kind_and_copying_it_back_changes_nothing(gone):
    """Streams of equal text are one again."""
    plan = spread("zbv", 5, gone, 3, {4})
    kinds = kinds_of(plan)
    first = first_of_each(plan, kinds)
    assert len(first.groups) < len(plan.groups)
    again = for_all(plan, first, kinds)
    assert streams_of(again) == streams_of(plan)
    assert again.groups == plan.groups
