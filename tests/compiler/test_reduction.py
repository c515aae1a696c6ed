"""What the reduction of gradients takes: who shares adapters, slow links, uneven pipelines."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from plan_cases import plan_of
from test_adaptation_problems import situation_of

from resihp.compiler.cluster import SlowLink
from resihp.compiler.policies.oobleck import reductions
from resihp.ir.model import Group, LayerRange

PLAN = plan_of(tp=2, pp=2, dp=4)
"""Four ranks a node: one replica each."""
STAGE = [group for group in PLAN.groups if group.pp == 0]
LAYERS = STAGE[0].sole_layers


def test_a_slow_link_of_the_ring_slows_every_step_of_it():
    """Two replicas after each other, the first and the last; no other pair."""
    healthy_s = situation_of(PLAN).pricing.reduce_s(STAGE, LAYERS)
    for nodes, slower in (((1, 2), True), ((0, 3), True), ((0, 2), False)):
        link = SlowLink(nodes=nodes, factor=2.0, delay_s=0.03)
        slow_s = situation_of(PLAN, links=[link]).pricing.reduce_s(STAGE, LAYERS)
        assert slow_s == pytest.approx(2 * healthy_s + 6 * 0.03 if slower else healthy_s)


def test_standby_and_lost_ranks_leave_their_adapters_to_others():
    """Half of each node computes: half of the bytes go through each adapter."""
    pricing = situation_of(PLAN).pricing
    whole_s = pricing.reduce_s(STAGE, LAYERS, pricing.busy(PLAN.groups))
    half_s = pricing.reduce_s(STAGE, LAYERS, pricing.busy(STAGE))
    assert whole_s == pricing.reduce_s(STAGE, LAYERS)
    assert half_s < 0.7 * whole_s
    lost = {group.ranks[at] for group in PLAN.groups if group.pp == 1 for at in (0, 1)}
    assert situation_of(PLAN, lost=lost).pricing.reduce_s(STAGE, LAYERS) == half_s


def test_oobleck_reduces_each_layer_among_the_stages_that_hold_it():
    """A pipeline of two stages beside one of three: four pieces, each between its two holders."""

    def pipeline(replica: int, *bounds: int) -> list[Group]:
        ranges = pairwise(bounds)
        return [
            Group(
                replica=replica,
                pp=pp,
                ranks=(4 * replica + pp,),
                layers=(LayerRange(first, end - 1),),
            )
            for pp, (first, end) in enumerate(ranges)
        ]

    two, three = pipeline(0, 0, 3, 6), pipeline(1, 0, 2, 4, 6)
    plan = msgspec.structs.replace(PLAN, model=msgspec.structs.replace(PLAN.model, layers=6))
    pricing = situation_of(plan).pricing
    busy = pricing.busy((*two, *three))

    def between(one: Group, other: Group, first: int, last: int) -> float:
        return pricing.reduce_s([one, other], LayerRange(first, last), busy)

    first, middle = between(two[0], three[0], 0, 1), between(two[0], three[1], 2, 2)
    later, last = between(two[1], three[1], 3, 3), between(two[1], three[2], 4, 5)
    assert reductions(pricing, [two, three]) == pytest.approx(
        {
            two[0].ranks: first + middle,
            two[1].ranks: later + last,
            three[0].ranks: first,
            three[1].ranks: middle + later,
            three[2].ranks: last,
        }
    )
