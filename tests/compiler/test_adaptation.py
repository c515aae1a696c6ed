"""Adaptation: what is decided after failures is verified, simulated and never worse than before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, lacking, plan_of, work_of
from test_adaptation_problems import situation_of

from resihp.compiler.adaptation import (
    ANYTHING,
    UNCHANGED,
    WHOLE_MICROBATCHES,
    Decision,
    Situation,
    adapt,
)
from resihp.compiler.cluster import CLUSTERS, Health
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
    if decision.no_change_s is not None:
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
