"""Adaptation: what is decided after failures is verified, simulated and never worse than before."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, lacking, plan_of, work_of
from test_adaptation_problems import situation_of

from resihp.compiler.adaptation import (
    ANYTHING,
    UNCHANGED,
    WHOLE_MICROBATCHES,
    Decision,
    Profile,
    Situation,
    adapt,
)
from resihp.compiler.adaptation.layouts import gains_holders
from resihp.compiler.capacity import peak_bytes
from resihp.compiler.cluster import CLUSTERS, Health, SlowLink
from resihp.compiler.costs import CostModel
from resihp.compiler.layout import initial_plan
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Batch, Mesh, Plan
from resihp.ir.placement import placement_of

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv")


def assert_sound(decision: Decision, situation: Situation) -> None:
    """All that holds of every decision."""
    plan, previous = decision.plan, situation.previous
    assert findings(plan, previous) == []
    assert lacking(previous, plan) == set()
    assert situation.lost.isdisjoint(plan.active_ranks)
    told = sorted((*plan.active_ranks, *plan.standby, *plan.lost))
    assert told == list(range(plan.mesh.world))
    assert set(work_of(plan).values()) == {1}
    stages = placement_of(plan)
    assert len(work_of(plan)) == stages.num_stages * plan.mesh.dp * plan.batch.microbatches
    assert [layers.first for layers in stages.layers[1:]] == [
        layers.last + 1 for layers in stages.layers[:-1]
    ]
    assert decision.iteration_s == simulate(plan, situation.pricing).iteration_s
    if decision.no_change_s is not None and not gains_holders(situation, previous, plan):
        assert decision.iteration_s <= decision.no_change_s
    for each in decision.considered:
        if each.makespan_s is not None and each.bound_s is not None:
            assert each.makespan_s >= each.bound_s


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from((ANYTHING, WHOLE_MICROBATCHES)))
def test_any_state_of_health_has_a_sound_plan_or_a_reason(rng, profile):
    """Random failures, twice in a row: verified, simulated as told, never worse than unchanged."""
    tp, pp, dp = rng.choice(((1, 2, 2), (2, 2, 2), (4, 2, 2), (2, 3, 3), (4, 1, 3), (2, 3, 1)))
    plan = plan_of(tp, pp, dp, microbatches=rng.randint(1, 5), schedule=rng.choice(SCHEDULES))
    lost: set[int] = set()
    speed: dict[int, float] = {}
    for _ in range(2):
        alive = sorted(set(range(plan.mesh.world)) - lost)
        lost |= set(rng.sample(alive, min(len(alive), rng.choice((0, 1, 1, 2)))))
        speed |= {rank: rng.choice((0.2, 0.5, 0.9)) for rank in rng.sample(alive, 1)}
        situation = situation_of(plan, lost=lost, speed=speed).with_profile(profile)
        try:
            decision = adapt(situation, budget=500)
        except NoFeasiblePlan:
            return
        assert_sound(decision, situation)
        if not profile.moves_single_stages:
            assert runs_whole_microbatches(decision.plan)
        plan = decision.plan


def runs_whole_microbatches(plan: Plan) -> bool:
    return all(instr.peer is None for stream in plan.streams for instr in stream.body)


def test_healthy_devices_change_nothing():
    """With nothing lost and nothing slow the plan stays, unless another order saves much."""
    plan = plan_of(microbatches=8)
    decision = adapt(situation_of(plan), least_gain=0.05)
    assert decision.chosen == UNCHANGED
    assert decision.plan == plan
    assert decision.moved_bytes == 0


def test_a_plan_that_lacks_a_few_bytes_is_made_again_with_less_in_flight():
    """A stage that is full to the last micro-batch, and buffers that nobody had counted."""
    cluster, model = CLUSTERS["a100-2048x8"], find_model("llama2-70b")
    plan = initial_plan(
        model.shape,
        Mesh(tp=4, pp=16, dp=4),
        Batch(microbatches=32, tokens=2048),
        schedule="zb-h1",
        memory_bytes=cluster.device.memory_bytes,
        precision="bf16",
    )
    costs = CostModel.of_description(model, cluster, precision="bf16")
    health = Health(speed={13: 1 / 1.3})
    decision = adapt(Situation(plan, Pricing(plan.model, costs, cluster, health)))
    assert decision.no_change_s is not None
    assert decision.iteration_s < 0.9 * decision.no_change_s


def test_a_slow_member_is_left_out_where_the_others_are_faster_without_it():
    """At a tenth of the speed it holds its group up; the rest go on at half the degree."""
    situation = situation_of(plan_of(tp=4, pp=1, dp=1, microbatches=4), speed={3: 0.1})
    decision = adapt(situation.with_profile(WHOLE_MICROBATCHES))
    assert decision.chosen.startswith("TP")
    assert 3 in decision.plan.standby
    assert_sound(decision, situation)


def test_layers_leave_a_slow_stage():
    """With one replica nothing else helps: the slow stage ends up with fewer layers."""
    plan = plan_of(tp=1, pp=2, dp=1, microbatches=8)
    situation = situation_of(plan, speed={1: 0.4})
    decision = adapt(situation)
    assert decision.chosen.startswith("PP")
    sizes = [last - first + 1 for first, last in placement_of(decision.plan).layers]
    assert sizes[1] < sizes[0]
    assert decision.moved_bytes > 0
    assert_sound(decision, situation)


def test_micro_batches_leave_a_slow_stage():
    """Where layers stay, the fast replica runs more of the stage that is slow in the other."""
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=8)
    profile = Profile(repartitions=False)
    situation = situation_of(plan, speed={1: 0.4}).with_profile(profile)
    decision = adapt(situation)
    assert "DP" in decision.chosen
    assert decision.plan.groups == plan.groups
    foreign = [i for s in decision.plan.streams for i in s.body if i.home is not None]
    assert foreign
    assert_sound(decision, situation)


def test_a_stage_that_is_gone_runs_in_the_other_replica_and_the_rest_stays():
    """Only the lost stage of replica 0 moves; its other stage goes on."""
    plan = plan_of(tp=1, pp=2, dp=3, microbatches=6)
    situation = situation_of(plan, lost=[1])
    decision = adapt(situation)
    if any(group.replica == 0 for group in decision.plan.groups):
        assert decision.plan.group(0, 0) is not None
    assert decision.no_change_s is None
    assert_sound(decision, situation)


def nearly_full(share: float) -> Situation:
    """Memory is the healthy peak times `share`; a rank is lost and another one slow."""
    plan = plan_of(tp=2, pp=2, dp=3, microbatches=6)
    peak = max(peak_bytes(plan).values())
    tight = msgspec.structs.replace(plan, memory_bytes=int(peak * share))
    return situation_of(tight, lost=[5], speed={0: 0.5})


@pytest.mark.parametrize("share", [1.2, 1.3])
def test_memory_that_is_nearly_full_is_kept_to(share):
    """A fifth more than the healthy peak is enough for what the others have to do."""
    assert_sound(adapt(nearly_full(share)), nearly_full(share))


def test_too_little_memory_for_moved_work_leaves_no_plan():
    """It needs sums of gradients of its own, each a copy of the parameters."""
    with pytest.raises(NoFeasiblePlan, match="fits into memory: dp"):
        adapt(nearly_full(1.0))


def test_the_same_situation_gives_the_same_decision():
    """Budgets are in chunks, not in seconds."""
    plan = plan_of(tp=2, pp=2, dp=3, microbatches=6)
    one, other = (adapt(situation_of(plan, lost=[5], speed={0: 0.5})) for _ in range(2))
    assert one == other


def test_a_slow_link_gets_more_warm_up():
    """A delay between two nodes is hidden behind forwards; nothing else changes."""
    plan = plan_of(tp=2, pp=4, dp=1, microbatches=12)
    situation = situation_of(plan, links=[SlowLink(nodes=(0, 1), delay_s=0.02)])
    decision = adapt(situation)
    assert decision.no_change_s is not None
    assert decision.iteration_s < 0.9 * decision.no_change_s
    assert_sound(decision, situation)


def test_state_that_died_with_its_last_holder_leaves_no_plan():
    """And a plan without room for what is left says so."""
    with pytest.raises(NoFeasiblePlan, match=r"no live rank still holds chunk 1 of 2"):
        adapt(situation_of(plan_of(), lost=[1, 5]))


def test_a_decision_is_told_in_a_few_lines_and_as_a_record():
    """What was chosen and what it saves, a line for each that was planned, one for all others."""
    decision = adapt(situation_of(plan_of(tp=2, pp=2, dp=2, microbatches=8), speed={0: 0.5}))
    lines = decision.summary().splitlines()
    assert lines[0].startswith(f"{decision.chosen}: ")
    assert "% less than unchanged" in lines[0]
    planned = [each for each in decision.considered if not each.is_pruned]
    assert 0 < len(planned) < len(decision.considered)
    assert [line for line in lines if line.startswith("  - ")][:-1] == [e.line for e in planned]
    assert lines[-1].endswith(" and cannot win")
    record = decision.record()
    assert "plan" not in record
    assert record["chosen"] == decision.chosen
