"""Plans for what is left: who goes on, where state comes from, and when there is no plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    FREE_LINKS,
    ONE_STAGE_SCHEDULES,
    chunks_by_rank,
    findings,
    lacking,
    model_of,
    plan_of,
    work_of,
)

from resihp.compiler import (
    SCHEDULES,
    facts_of,
    home_work,
    lower,
    ordered,
)
from resihp.compiler.adapt import adapt as decide
from resihp.compiler.adaptation import WHOLE_MICROBATCHES
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Group, GroupName, LayerRange, Mesh, Plan, Reshard, Resume
from resihp.ir.placement import placement_of


def adapt(previous: Plan, lost: Iterable[int], step: int) -> Plan:
    """The plan where neither layers nor single stages of micro-batches may move."""
    return decide(
        previous, lost=lost, step=step, cluster=FREE_LINKS, profile=WHOLE_MICROBATCHES
    ).plan


def groups_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {str(group.name): group.ranks for group in plan.groups}


def assert_sound(plan: Plan, previous: Plan) -> None:
    """The verifier is content, all state is in place, all work is done once, all ranks told."""
    assert findings(plan, previous) == []
    assert lacking(previous, plan) == set()
    mesh = plan.mesh
    assert set(work_of(plan).values()) == {1}
    num_stages = placement_of(plan).num_stages
    assert len(work_of(plan)) == num_stages * mesh.dp * plan.batch.microbatches
    told = sorted((*plan.active_ranks, *plan.standby, *plan.lost))
    assert told == list(range(mesh.world))


def test_a_group_that_lost_a_member_shrinks_and_its_peer_brings_the_rest():
    """The issue's own case: TP 2, rank 5 dies, rank 4 goes on with the whole of layers 0..2."""
    healthy = plan_of()
    plan = adapt(healthy, [5], step=30)
    assert groups_of(plan) == {
        "dp0.pp0": (0, 1), "dp0.pp1": (2, 3), "dp1.pp0": (4,), "dp1.pp1": (6, 7),
    }  # fmt: skip
    source, target = GroupName(0, 0), GroupName(1, 0)
    assert plan.reconfigure == (Reshard(layers=LayerRange(0, 2), source=source, target=target),)
    assert (plan.resume, plan.standby, plan.lost) == (Resume(step=30), (), (5,))
    assert_sound(plan, healthy)


def test_survivors_that_are_no_power_of_two_leave_one_standby():
    """Three of four: two go on with half of the layers each, in the seats that move least."""
    healthy = plan_of(tp=4, pp=1)
    plan = adapt(healthy, [6], step=1)
    assert groups_of(plan) == {"dp0.pp0": (0, 1, 2, 3), "dp1.pp0": (4, 7)}
    assert plan.standby == (5,)
    assert plan.reshards[0].source == (0, 0)
    assert_sound(plan, healthy)


def test_the_own_group_is_the_source_where_its_survivors_hold_all_that_is_missing():
    """One replica is enough when a parked member gives its shard away."""
    healthy = plan_of(tp=4, pp=1, dp=2)
    smaller = adapt(healthy, [1, 2], step=1)
    # Both replicas are whole again by halves: now a standby rank replaces a lost one.
    assert groups_of(smaller)["dp0.pp0"] == (0, 3)
    assert smaller.reshards[0].source == (1, 0)
    assert_sound(smaller, healthy)


def test_a_standby_rank_takes_the_place_of_a_lost_one():
    """The degree is kept while there is somebody to take the seat."""
    healthy = plan_of(tp=4, pp=1)
    first = adapt(healthy, [6], step=1)
    second = adapt(first, [4], step=2)
    assert groups_of(second) == {"dp0.pp0": (0, 1, 2, 3), "dp1.pp0": (5, 7)}
    assert second.standby == ()
    assert second.lost == (4, 6)
    assert_sound(second, first)


def test_what_one_group_leaves_over_fills_another():
    """Three of four in two groups: one gets the fourth member from the other."""
    healthy = plan_of(tp=4, pp=1, dp=2)
    plan = adapt(healthy, [0, 6], step=1)
    assert sorted(len(ranks) for ranks in groups_of(plan).values()) == [2, 4]
    assert plan.standby == ()
    assert_sound(plan, healthy)


def test_a_replica_without_a_stage_is_dropped_and_the_others_run_its_work():
    """Its other ranks become standby; its micro-batches go on, named by their home."""
    healthy = plan_of(dp=3)
    plan = adapt(healthy, [4, 5], step=7)
    assert sorted({group.replica for group in plan.groups}) == [0, 2]
    assert plan.standby == (6, 7)
    assert plan.reconfigure == ()
    foreign = {
        (replica, instr.microbatch)
        for stream in plan.streams
        for replica in stream.replicas
        for instr in stream.body
        if instr.home == 1
    }
    assert foreign == {(0, 0), (0, 1), (2, 2), (2, 3)}
    assert_sound(plan, healthy)


def test_a_rank_of_a_dropped_replica_that_holds_the_shard_takes_the_seat():
    """Nothing moves: rank 2 held the same half of the same layers in another replica."""
    healthy = plan_of()
    plan = adapt(healthy, [0, 1, 6], step=7)
    assert groups_of(plan) == {"dp1.pp0": (4, 5), "dp1.pp1": (2, 7)}
    assert plan.reconfigure == ()
    assert plan.standby == (3,)
    assert_sound(plan, healthy)


def test_two_groups_of_one_stage_can_serve_each_other():
    """Each lost another half; each gives the half that it kept."""
    healthy = plan_of()
    plan = adapt(healthy, [0, 5], step=7)
    assert [(str(r.source), str(r.target)) for r in plan.reshards] == [
        ("dp1.pp0", "dp0.pp0"), ("dp0.pp0", "dp1.pp0"),
    ]  # fmt: skip
    assert_sound(plan, healthy)


def test_state_that_died_with_its_last_holder_leaves_no_plan():
    """Both halves of every copy are needed; the sentence names layers and chunk."""
    with pytest.raises(NoFeasiblePlan) as caught:
        adapt(plan_of(), [1, 5], step=7)
    assert str(caught.value) == "no live rank still holds chunk 1 of 2 of layers 0..2"


def test_a_stale_standby_rank_is_no_source():
    """Ranks that did not take part in the last steps hold old parameters."""
    dropped = adapt(plan_of(), [4, 5], step=7)
    assert dropped.standby == (6, 7)
    with pytest.raises(NoFeasiblePlan, match=r"chunk 0 of 2 of layers 3\.\.5"):
        adapt(dropped, [2], step=8)


def test_ranks_that_the_job_does_not_have_are_the_callers_fault():
    """The message names the rank and the valid ones."""
    with pytest.raises(UserError, match=r"lost rank 8: the job's ranks are 0\.\.7"):
        adapt(plan_of(), [8], step=1)


def test_a_rank_may_be_reported_lost_twice():
    """What is lost already changes nothing."""
    plan = adapt(plan_of(), [5], step=3)
    again = adapt(plan, [5], step=3)
    assert again.groups == plan.groups
    assert again.reconfigure == ()
    assert_sound(again, plan)


def test_the_order_line_says_who_made_the_streams():
    """Neither the name of before nor that of a schedule: the planner's."""
    by_hand = msgspec.structs.replace(plan_of(), schedule="mine")
    plan = adapt(by_hand, [5], step=3)
    assert plan.schedule == "resihp"
    assert_sound(plan, by_hand)


def test_a_group_too_large_for_fewer_devices_drops_its_replica():
    """k_min: where the layers do not fit at TP 1, the survivor is parked."""
    roomy = plan_of()
    needed = adapt(roomy, [5], step=1)
    sizes = facts_of(needed).stages
    alone = sizes[GroupName(1, 0)][0]
    capacity = alone.state_bytes + alone.activation_bytes // 2
    assert capacity > sizes[GroupName(0, 0)][0].state_bytes
    tight = msgspec.structs.replace(roomy, memory_bytes=capacity)
    plan = adapt(tight, [5], step=1)
    assert groups_of(plan) == {"dp0.pp0": (0, 1), "dp0.pp1": (2, 3)}
    assert plan.standby == (4, 6, 7)
    assert_sound(plan, tight)


def test_parked_ranks_save_the_last_replica_that_needs_a_high_degree():
    """Neither replica fits at TP 2, but together they are one of TP 4."""
    healthy = plan_of(tp=4, pp=1)
    by_two = adapt(msgspec.structs.replace(healthy, memory_bytes=None), [0, 1], step=1)
    (half,) = facts_of(by_two).stages[GroupName(0, 0)]
    capacity = half.state_bytes + half.activation_bytes // 2
    tight = msgspec.structs.replace(healthy, memory_bytes=capacity)
    plan = adapt(tight, [0, 1, 6, 7], step=1)
    assert groups_of(plan) == {"dp0.pp0": (4, 5, 2, 3)}
    assert_sound(plan, tight)


def test_work_that_fits_no_device_leaves_no_plan():
    """The last replica's sums of gradients and one micro-batch in flight are too much."""
    roomy = plan_of(tp=1, schedule="gpipe")
    (sizes,) = facts_of(roomy).stages[GroupName(0, 0)]
    capacity = sizes.state_bytes + 3 * sizes.activation_bytes
    tight = msgspec.structs.replace(roomy, memory_bytes=capacity)
    with pytest.raises(NoFeasiblePlan) as caught:
        adapt(tight, [2], step=1)
    assert re.fullmatch(
        r"no plan for what is left fits into memory: dp\d\.pp\d \(layers \d\.\.\d, TP 1\) needs "
        r"[\d.]+ MiB on each rank for one micro-batch in flight.*; a device has [\d.]+ MiB",
        str(caught.value),
    )


def test_state_that_only_several_groups_together_hold_comes_from_several():
    """No single group has all that is lacking; each gives what its live members hold."""
    plan = plan_of(tp=8, pp=1)
    for step, lost in enumerate([(1, 2), (7, 14)]):
        plan = adapt(plan, lost, step)
    assert every_chunk_lives(plan, (3, 6, 9))
    after = adapt(plan, (3, 6, 9), step=2)
    assert_sound(after, plan)
    targets = [reshard.target for reshard in after.reconfigure]
    assert len(targets) > len(set(targets))


def test_a_v_shaped_pipeline_goes_on_v_shaped():
    """Each stage of a group that shrank is brought, and the order is made again."""
    healthy = plan_of(schedule="zbv")
    plan = adapt(healthy, [5], step=30)
    assert plan.schedule == "zbv"
    source, target = GroupName(0, 0), GroupName(1, 0)
    assert plan.reconfigure == (
        Reshard(layers=LayerRange(0, 0), source=source, target=target),
        Reshard(layers=LayerRange(5, 5), source=source, target=target),
    )
    assert_sound(plan, healthy)


def test_interleaving_goes_on_with_any_number_of_micro_batches():
    """Two replicas run the 5 of a third beside their own, one 7 and one 8."""
    healthy = plan_of(dp=3, microbatches=5, schedule="interleaved-1f1b")
    plan = adapt(healthy, [4, 5], step=7)
    assert plan.schedule == "interleaved-1f1b"
    assert_sound(plan, healthy)


def test_stages_that_no_other_schedule_is_made_for_run_breadth_first():
    """Positions 0, 1, 1, 0 and 0: neither looped nor in V shape."""
    model, mesh = model_of(layers=5), Mesh(tp=2, pp=2, dp=2)
    groups = tuple(
        Group(replica=replica, pp=pp, ranks=ranks, layers=tuple(LayerRange(n, n) for n in layers))
        for replica, pp, ranks, layers in [
            (0, 0, (0, 1), (0, 3, 4)), (0, 1, (2, 3), (1, 2)),
            (1, 0, (4, 5), (0, 3, 4)), (1, 1, (6, 7), (1, 2)),
        ]
    )  # fmt: skip
    plan = Plan(
        model=model, mesh=mesh, batch=Batch(microbatches=3, tokens=32), groups=groups, streams=()
    )
    healthy = lower(ordered(plan, "gpipe", home_work(range(2), 3)))
    assert findings(healthy) == []
    by_hand = msgspec.structs.replace(healthy, schedule="mine")
    degraded = adapt(by_hand, [6], step=1)
    assert degraded.schedule == "looped-bfs"
    assert_sound(degraded, by_hand)


def test_a_replica_that_lacks_a_position_is_dropped():
    """What it held elsewhere is a source of state, its ranks are spare."""
    healthy = plan_of()
    groups = tuple(group for group in healthy.groups if group.name != (1, 0))
    partial = msgspec.structs.replace(healthy, groups=groups, lost=(4, 5))
    plan = adapt(partial, [2], step=3)
    assert groups_of(plan) == {"dp0.pp0": (0, 1), "dp0.pp1": (6, 3)}
    assert_sound(plan, partial)


GRID = [(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 3), (4, 2, 2), (2, 3, 2)]


@pytest.mark.parametrize(("tp", "pp", "dp"), GRID)
def test_every_loss_of_one_or_two_ranks_has_a_sound_plan_or_a_dead_chunk(tp, pp, dp):
    """Exhaustive: from a healthy plan one exists exactly where each chunk has a live holder."""
    schedule = (*ONE_STAGE_SCHEDULES, "interleaved-1f1b", "zbv")[GRID.index((tp, pp, dp))]
    healthy = plan_of(tp, pp, dp, microbatches=3, schedule=schedule)
    world = range(healthy.mesh.world)
    for lost in [*combinations(world, 1), *combinations(world, 2)]:
        if every_chunk_lives(healthy, lost):
            assert_sound(adapt(healthy, lost, step=5), healthy)
        else:
            with pytest.raises(NoFeasiblePlan, match="still holds"):
                adapt(healthy, lost, step=5)


def every_chunk_lives(plan: Plan, lost: tuple[int, ...]) -> bool:
    """Whether the ranks that are left hold all chunks of all layers between them."""
    held = chunks_by_rank(plan)
    alive = [layers for rank, layers in held.items() if rank not in lost]
    return all(
        set(range(plan.mesh.tp)) == set().union(*(layers.get(layer, set()) for layers in alive))
        for layer in range(plan.model.layers)
    )


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 2), (4, 1, 2), (2, 1, 3), (1, 3, 2)])
def test_a_plan_is_found_exactly_where_each_chunk_has_a_live_holder(tp, pp, dp):
    """All subsets of ranks of small jobs, with plenty of memory."""
    healthy = plan_of(tp, pp, dp, microbatches=2, memory_bytes=None)
    world = range(healthy.mesh.world)
    for lost in (c for size in world for c in combinations(world, size)):
        try:
            plan = adapt(healthy, lost, step=5)
        except NoFeasiblePlan:
            assert not every_chunk_lives(healthy, lost)
        else:
            assert every_chunk_lives(healthy, lost)
            assert lacking(healthy, plan) == set()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, 2, 2), (4, 1, 3), (4, 2, 2), (2, 2, 4), (8, 1, 2), (1, 4, 3)]),
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_losses_one_after_another_give_sound_plans_until_there_is_none(
    degrees, schedule, microbatches, losses
):
    """Adapted plans are adapted again; each is sound after the one before."""
    tp, pp, dp = degrees
    plan = plan_of(tp, pp, dp, microbatches, schedule)
    for step, drawn in enumerate(losses):
        lost = {rank % plan.mesh.world for rank in drawn}
        previous = plan
        try:
            plan = adapt(previous, lost, step)
        except NoFeasiblePlan:
            return
        assert_sound(plan, previous)
        assert set(plan.lost) == set(previous.lost) | lost
        assert plan == adapt(previous, sorted(lost, reverse=True), step)
