"""Two live holders of each layer are worth more than time: one loss is then no end of the job."""

from __future__ import annotations

from functools import cache

import pytest

from resihp.compiler.adaptation import UNCHANGED, Situation, adapt
from resihp.compiler.adaptation.hysteresis import Patience, Trust
from resihp.compiler.adaptation.layouts import num_holders
from resihp.compiler.adaptation.rejoin import grow_back
from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.errors import UserError
from resihp.ir.model import Batch, Mesh, Plan

CLUSTER = CLUSTERS["a100-32x8"]
MODEL = find_model("llama2-13b")


def pricing(lost: tuple[int, ...] = ()) -> Pricing:
    costs = CostModel.of_description(MODEL, CLUSTER)
    return Pricing(MODEL.shape, costs, CLUSTER, Health(lost=frozenset(lost)))


@cache
def job() -> Plan:
    """Two replicas on 32 devices, whose reduction over the one adapter of a node takes long."""
    recipe = Recipe(
        mesh=Mesh(tp=4, pp=4, dp=2),
        batch=Batch(microbatches=8, tokens=4096),
        schedule="1f1b",
        precision="bf16",
        memory_bytes=CLUSTER.device.memory_bytes,
    )
    return healthy_plan(recipe, pricing())


@cache
def alone() -> Plan:
    """After the loss of rank 5 by time alone: one replica, half of the devices standby."""
    return adapt(Situation(job(), pricing((5,)), min_holders=1)).plan


def test_a_loss_leaves_each_layer_two_holders_though_one_would_be_faster():
    """By time alone one replica goes on with 15 ranks standby, and the next loss may end it."""
    assert num_holders(alone().groups) == 1
    assert len(alone().standby) >= 15
    careful = adapt(Situation(job(), pricing((5,))))
    assert num_holders(careful.plan.groups) == 2
    again = adapt(Situation(careful.plan, pricing((careful.plan.groups[0].ranks[0],))))
    assert num_holders(again.plan.groups) == 2


def test_standby_ranks_fill_missing_places_without_any_new_failure():
    """One replica goes on alone; it is faster unchanged and yet grows to two."""
    grown = adapt(Situation(alone(), pricing()))
    assert num_holders(grown.plan.groups) == 2
    assert grown.no_change_s is not None
    assert grown.iteration_s > grown.no_change_s
    told = next(each for each in grown.considered if each.name == UNCHANGED)
    assert told.why.endswith("fewer holders of a layer")
    growth = grow_back(alone(), pricing(), (), trust=Trust(), patience=Patience(), iteration=1)
    assert growth.verdict.grow
    stays = adapt(Situation(alone(), pricing(), min_holders=1))
    assert num_holders(stays.plan.groups) == 1
    assert stays.iteration_s <= grown.no_change_s


def test_a_job_back_on_all_its_devices_is_as_it_was():
    """The healthy layout is a candidate, whatever the groups have become."""
    back = adapt(Situation(alone(), pricing(), returned=(5,)))
    assert [group.tp for group in back.plan.groups] == [4] * 8
    healthy_s = adapt(Situation(job(), pricing())).iteration_s
    assert back.iteration_s <= healthy_s * 1.01


def test_holders_are_at_least_one():
    """And never more than replicas."""
    with pytest.raises(UserError, match="0 holders"):
        Situation(job(), pricing(), min_holders=0)
    assert Situation(job(), pricing(), min_holders=9).min_holders == 2
