"""Lost ranks come back: groups and replicas grow to what they were."""

from __future__ import annotations

import pytest
from plan_cases import findings, lacking, plan_of
from test_adaptation_problems import SMALL_NODES

from resihp.compiler import initial_plan
from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.cluster import Health
from resihp.compiler.costs import CostModel
from resihp.compiler.models import Model
from resihp.compiler.pricing import Pricing
from resihp.errors import UserError
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
