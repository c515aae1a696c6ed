"""Plans for a coordinator: where state comes from that no live rank holds."""

from __future__ import annotations

import pytest
from coordinator_cases import job_of

from resihp.compiler.adaptation import Patience, Trust
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Resume
from resihp.ir.reshard import loads, nothing_before, transfers
from resihp.monitor.planner import Grown, Planner, VerifiedPlan

JOB = job_of(tp=2, pp=2, dp=2)


def test_a_snapshot_stands_in_for_a_shard_without_a_live_holder():
    """Ranks 1 and 5 held the second half of the first layers; rank 4 reads what rank 5 left."""
    planner = Planner(JOB)
    healthy = planner.initial()
    with pytest.raises(NoFeasiblePlan):
        planner.after_loss(healthy, [1, 5], 3)
    plan = planner.after_loss(healthy, [1, 5], 3, snapshots={5: (4, 6)}).plan
    read = {(m.snapshot_of, m.source) for m in transfers(healthy.plan, plan) if m.snapshot_of}
    assert read
    assert {lost for lost, _ in read} == {5}
    assert {giver for _, giver in read} <= {4, 6}


def test_a_job_may_begin_with_a_checkpoint_in_any_layout():
    """At the start, or where survivors must go back: everybody reads all that it holds."""
    planner = Planner(JOB)
    healthy = planner.initial()
    again = planner.loading(healthy, 7).plan
    assert again.resume == Resume(step=7)
    assert (again.groups, again.streams) == (healthy.plan.groups, healthy.plan.streams)
    fewer = planner.from_checkpoint(healthy, [1, 5], 7).plan
    for plan in (again, fewer):
        assert transfers(nothing_before(plan), plan) == ()
        assert {load.target for load in loads(nothing_before(plan), plan)} == set(plan.active_ranks)


def test_a_plan_that_did_without_the_lost_goes_back_to_a_checkpoint_as_it_is():
    """Nobody in it is lost, and yet nobody holds anything: all of it is read."""
    planner = Planner(JOB)
    before = planner.after_loss(planner.initial(), [1], 3)
    plan = planner.from_checkpoint(before, [1], 7).plan
    empty = nothing_before(plan)
    assert transfers(empty, plan) == ()
    assert {load.target for load in loads(empty, plan)} == set(plan.active_ranks)


THREE = job_of(tp=1, pp=2, dp=3)


def grown(planner: Planner, previous: VerifiedPlan, switch_steps: float = 0.0) -> Grown:
    """With rank 1 back, half of the iterations before the end."""
    return planner.after_return(
        previous,
        [1],
        [1],
        trust=Trust(),
        patience=Patience(),
        iteration=50,
        left=50,
        switch_steps=switch_steps,
    )


def test_a_job_goes_back_to_a_checkpoint_after_a_rank_came_back():
    """Who reads everything has nothing to return to."""
    planner = Planner(THREE)
    whole = grown(planner, planner.after_loss(planner.initial(), [1], 3)).plan
    assert whole is not None
    assert whole.plan.returned == (1,)
    assert planner.loading(whole, 7).plan.returned == ()


def test_the_price_of_a_switch_counts_under_a_new_coordinator():
    """One that took over has the plan, and not why it was chosen."""
    planner = Planner(THREE)
    small = planner.after_loss(planner.initial(), [1], 3)
    taken_over = VerifiedPlan(small.text, small.plan)
    for switch_steps in (0.0, 1.0, 1e6):
        assert grown(planner, taken_over, switch_steps) == grown(planner, small, switch_steps)
    assert grown(planner, taken_over).plan is not None
    assert grown(planner, taken_over, 1e6).plan is None
