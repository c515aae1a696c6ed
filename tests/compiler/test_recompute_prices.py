"""Stages that compute their forward again: less memory, more time, and plans that follow them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from plan_cases import findings, plan_of

from resihp.compiler import facts_of
from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.cluster import Health
from resihp.compiler.costs import Lengths
from resihp.compiler.defaults import pricing_of_plan
from resihp.compiler.layout import initial_plan
from resihp.compiler.simulate import simulate
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Batch, GroupName, Mesh, Op

PLAN = plan_of(tp=1, pp=2, dp=2)
AGAIN = replace(PLAN, recompute=(1,))
NAMES = GroupName(0, 0), GroupName(0, 1)


def test_only_its_input_is_kept_from_f_to_b():
    """Of the stages that are named; B has all of it at once, and the same stays until W."""
    kept, again = (facts_of(plan).stages for plan in (PLAN, AGAIN))
    assert kept[NAMES[0]] == again[NAMES[0]]
    (one,), (other,) = kept[NAMES[1]], again[NAMES[1]]
    assert other.activation_bytes == one.boundary_bytes == other.boundary_bytes
    assert other.state_bytes == one.state_bytes

    def while_b_runs(sizes):
        return sizes.activation_bytes + sizes.weight_input_grad_bytes

    assert while_b_runs(other) == while_b_runs(one)
    assert other.released_by_b_bytes == one.released_by_b_bytes


def test_the_first_stage_keeps_nothing():
    """Its input are token numbers, which the data has."""
    (sizes,) = facts_of(replace(PLAN, recompute=(0,))).stages[NAMES[0]]
    assert sizes.activation_bytes == 0


def test_b_takes_as_much_longer_as_f_takes():
    """In the prices, of B and of BW."""
    pricing, group = pricing_of_plan(PLAN, Health()), PLAN.groups[1]
    lengths, layers = Lengths.of((32,)), group.sole_layers
    forward = pricing.compute_s(group, layers, Op.F, lengths)
    for op in (Op.B, Op.BW):
        once = pricing.compute_s(group, layers, op, lengths)
        again = pricing.compute_s(group, layers, op, lengths, recomputes=True)
        assert again == pytest.approx(once + forward)


def test_a_plan_takes_longer_and_needs_less():
    """As simulated; with all micro-batches in flight the saving is most of the activations."""
    plan = plan_of(tp=1, pp=2, dp=1, schedule="gpipe")
    pricing = pricing_of_plan(plan, Health())
    once, again = (simulate(p, pricing) for p in (plan, replace(plan, recompute=(0, 1))))
    assert 1.1 < again.iteration_s / once.iteration_s < 1.34
    for short, long in zip(again.peaks(), once.peaks(), strict=True):
        assert short.num_bytes < long.num_bytes


def test_what_does_not_fit_may_fit_when_it_is_computed_again():
    """The number that the job file's `recompute = true` is there for."""
    shape, mesh, batch = PLAN.model, Mesh(tp=1, pp=2, dp=1), Batch(microbatches=8, tokens=512)

    def made(memory_bytes, *, recomputes):
        return initial_plan(
            shape,
            mesh,
            batch,
            schedule="gpipe",
            memory_bytes=memory_bytes,
            recomputes=recomputes,
        )

    peak = max(
        peak.num_bytes
        for peak in simulate(
            made(1 << 40, recomputes=True), pricing_of_plan(PLAN, Health())
        ).peaks()
    )
    with pytest.raises(NoFeasiblePlan):
        made(peak, recomputes=False)
    assert made(peak, recomputes=True).recompute == (0, 1)


@pytest.mark.parametrize("recompute", [(0, 1), (1,)])
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_the_plan_after_a_loss_computes_the_same_stages_again(recompute, schedule):
    """In tight memory, with the layers where they were or moved; it is verified."""
    plan = replace(plan_of(tp=1, pp=2, dp=3, schedule=schedule), recompute=recompute)
    peaks = simulate(plan, pricing_of_plan(plan, Health())).peaks()
    tight = replace(plan, memory_bytes=int(1.2 * max(peak.num_bytes for peak in peaks)))
    pricing = pricing_of_plan(tight, Health(lost=frozenset([1])))
    decision = adapt(Situation(tight, pricing))
    assert decision.plan.recompute == recompute
    assert findings(decision.plan, previous=tight) == []
