"""Lost ranks come back: groups and replicas grow to what they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, lacking, plan_of
from test_adaptation_problems import SMALL_NODES

from resihp.compiler import initial_plan
from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.adaptation.hysteresis import Patience, Trust, Verdict
from resihp.compiler.adaptation.rejoin import grow_back
from resihp.compiler.cluster import Health
from resihp.compiler.costs import CostModel
from resihp.compiler.models import Model
from resihp.compiler.pricing import Pricing
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Mesh, ModelShape, Plan


def big_plan() -> Plan:
    """A job whose compute takes longer than its all-reduces, so that more ranks are faster."""
    model = ModelShape(
        name="big", layers=8, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=32000
    )
    return initial_plan(model, Mesh(tp=2, pp=2, dp=2), Batch(microbatches=4, tokens=2048))


def situation_of(plan: Plan, returned: tuple[int, ...] = (), **health) -> Situation:
    costs = CostModel.of_description(Model(shape=plan.model), SMALL_NODES, precision="fp32")
    pricing = Pricing(plan.model, costs, SMALL_NODES, Health(**health))
    return Situation(plan, pricing, returned=returned)


@pytest.mark.parametrize("lost", [(5,), (4, 5), (0, 5), (1, 2, 4)])
def test_a_job_whose_lost_ranks_all_return_is_whole_again(lost):
    """The degrees of before, and no slower than at first; the state comes from who has it."""
    healthy = big_plan()
    degraded = adapt(situation_of(healthy, lost=frozenset(lost))).plan
    grown = adapt(situation_of(degraded, returned=lost))
    back = grown.plan
    assert (back.lost, back.standby, back.returned) == ((), (), lost)
    assert [(g.name, g.tp) for g in back.groups] == [(g.name, g.tp) for g in healthy.groups]
    whole_s = adapt(situation_of(healthy)).no_change_s
    assert whole_s is not None
    assert grown.iteration_s <= whole_s * (1 + 1e-9)
    assert findings(back, degraded) == []
    assert lacking(degraded, back) == set()


def test_the_plan_after_a_return_does_not_return_anybody():
    """`returned` is about one change; the next plan starts from who is there."""
    healthy = big_plan()
    degraded = adapt(situation_of(healthy, lost=frozenset({5}))).plan
    back = adapt(situation_of(degraded, returned=(5,))).plan
    again = adapt(situation_of(back, lost=frozenset({4}))).plan
    assert again.returned == ()
    assert findings(again, back) == []


def test_a_rank_that_was_not_lost_cannot_return():
    """The message names who is lost."""
    degraded = adapt(situation_of(plan_of(), lost=frozenset({5}))).plan
    with pytest.raises(UserError, match="rank 3 cannot return: lost in the plan before is 5"):
        situation_of(degraded, returned=(3,))


def pricing_of(plan: Plan) -> Pricing:
    return situation_of(plan).pricing


PATIENT = Patience(good_iterations=4, most_iterations=64, horizon_iterations=10_000)


def test_a_plan_grows_back_only_when_its_ranks_are_trusted():
    """Rank 5 is lost in iteration 0 and back in 1: four good iterations are asked of it."""
    healthy = big_plan()
    degraded = adapt(situation_of(healthy, lost=frozenset({5}))).plan
    trust = Trust().seen(0, {5}, PATIENT)
    found: list[bool] = []
    for iteration in range(1, 6):
        trust = trust.seen(iteration, set(), PATIENT)
        growth = grow_back(
            degraded, pricing_of(healthy), {5}, trust=trust, patience=PATIENT, iteration=iteration
        )
        found.append(growth.verdict.grow)
        assert (growth.decision is not None) == growth.verdict.grow
    assert found == [False, False, False, True, True]


def test_a_plan_does_not_grow_for_a_gain_below_the_cost():
    """What one iteration saves does not pay for a switch of 1000 s."""
    healthy = big_plan()
    degraded = adapt(situation_of(healthy, lost=frozenset({5}))).plan
    short = Patience(horizon_iterations=1, switch_s=1000.0)
    growth = grow_back(
        degraded, pricing_of(healthy), {5}, trust=Trust(), patience=short, iteration=9
    )
    assert growth.decision is None
    assert growth.verdict.reason.startswith("saves ")


def test_standby_ranks_alone_are_no_reason_to_change():
    """A plan that is as good as can be stays."""
    healthy = big_plan()
    best = adapt(situation_of(healthy)).plan
    growth = grow_back(best, pricing_of(healthy), (), trust=Trust(), patience=PATIENT, iteration=9)
    assert growth.verdict == Verdict(grow=False, reason="no larger plan is faster")


def test_a_device_that_dies_whenever_it_is_used_changes_the_plan_ever_less_often():
    """200 iterations with real plans: 4, 8, 16, 32 and 64 good ones between the switches."""
    plan, trust, growths = big_plan(), Trust(), list[int]()
    pricing = pricing_of(plan)
    for iteration in range(200):
        dies = 5 in plan.active_ranks
        trust = trust.seen(iteration, {5} if dies else set(), PATIENT)
        if dies:
            previous = plan
            plan = adapt(situation_of(plan, lost=frozenset({5})), budget=0).plan
        else:
            growth = grow_back(
                plan, pricing, {5}, trust=trust, patience=PATIENT, iteration=iteration, budget=0
            )
            if growth.decision is None:
                continue
            previous, plan = plan, growth.decision.plan
            growths.append(iteration)
        assert findings(plan, previous) == []
    assert growths == [4, 13, 30, 63, 128, 193]


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(2, 2, 2), (4, 1, 2), (1, 2, 3)]))
def test_any_history_of_losses_and_returns_is_a_chain_of_sound_plans(rng, degrees):
    """Ranks die, slow down and come back in any order; each plan may follow the one before."""
    plan = plan_of(*degrees, schedule=rng.choice(("1f1b", "zb-h1")))
    for _ in range(4):
        back = [rank for rank in plan.lost if rng.random() < 0.6]
        alive = sorted(set(range(plan.mesh.world)) - set(plan.lost))
        lost = frozenset(rng.sample(alive, min(len(alive), rng.choice((0, 0, 1, 2)))))
        speed = {rank: 0.5 for rank in alive if rank not in lost and rng.random() < 0.1}
        previous = plan
        try:
            situation = situation_of(previous, tuple(back), lost=lost, speed=speed)
            plan = adapt(situation, budget=0).plan
        except NoFeasiblePlan:
            return
        assert findings(plan, previous) == []
        assert lacking(previous, plan) == set()
        assert set(plan.lost) == set(previous.lost).difference(back) | lost
        assert plan.returned == tuple(sorted(back))
