"""Plans for a coordinator: where state comes from that no live rank holds."""

from __future__ import annotations

import pytest
from coordinator_cases import job_of

from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Load, Resume
from resihp.ir.reshard import loads, nothing_before, transfers
from resihp.monitor.planner import Planner

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


def test_a_checkpoint_of_the_step_is_the_last_resort():
    """One of another step is none."""
    planner = Planner(JOB)
    healthy = planner.initial()
    with pytest.raises(NoFeasiblePlan):
        planner.after_loss(healthy, [1, 5], 3, checkpoint=2)
    plan = planner.after_loss(healthy, [1, 5], 3, checkpoint=3).plan
    assert any(isinstance(line, Load) for line in plan.reconfigure)


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
