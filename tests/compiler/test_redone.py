"""What an interrupted iteration does again, beside what is kept of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import FREE_LINKS, plan_of, work_of
from slow_player import slow_play

from resihp.compiler import facts_of
from resihp.compiler.adaptation import Situation, adapt, redone
from resihp.compiler.cluster import Health
from resihp.compiler.defaults import pricing_of_plan
from resihp.compiler.pricing import Pricing
from resihp.errors import NoFeasiblePlan
from resihp.ir.kept import kept_by, num_kept, weights_run_at, without
from resihp.ir.model import GroupName, MicroBatch, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

STEP = 7
ROUNDING = 1e-3
"""The planner counts in whole ticks."""


def pricing_for(plan: Plan, lost: frozenset[int]) -> Pricing:
    return pricing_of_plan(plan, Health(lost=lost), FREE_LINKS)


def all_of(plan: Plan) -> list[MicroBatch]:
    return [
        MicroBatch(home, number)
        for home in range(plan.mesh.dp)
        for number in range(plan.batch.microbatches)
    ]


def codes(plan: Plan, previous: Plan) -> set[str]:
    found = verify(parse(print_plan(plan)), previous=previous, facts=facts_of(plan))
    return {finding.code for finding in found}


def computed_s(plan: Plan, pricing: Pricing) -> float:
    """When the last group has computed all of its own, by a player of its own kind."""
    done = slow_play(plan, pricing)
    return max(
        (
            end
            for stream in plan.streams
            for replica in stream.replicas
            for instr, (_, end) in zip(
                stream.body, done[GroupName(replica, stream.pp)], strict=True
            )
            if instr.op in (Op.F, Op.B, Op.W, Op.BW)
        ),
        default=0.0,
    )


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_whatever_is_kept_the_rest_is_sound_and_no_slower_than_in_its_own_order(seed: int):
    """Any loss, any set of micro-batches, one or several stages at a position; layout, moves of
    state and everything else are those of the plan that follows."""
    rng = random.Random(seed)
    tp, pp, dp = rng.choice(((1, 2, 2), (2, 2, 2), (1, 1, 3), (2, 1, 2), (1, 4, 2), (1, 2, 3)))
    schedule = rng.choice(("1f1b", "zb-h1", "gpipe", *(("zbv",) if pp > 1 else ())))
    ran = plan_of(tp, pp, dp, rng.choice((2, 3, 4)), schedule)
    lost = frozenset(rng.sample(range(ran.mesh.world), rng.choice((1, 1, 2))))
    pricing = pricing_for(ran, lost)
    try:
        plan = adapt(Situation(ran, pricing, resume_step=STEP), budget=400).plan
    except NoFeasiblePlan:
        return
    keep = [each for each in all_of(plan) if rng.random() < 0.5]
    again = redone(plan, pricing, keep, STEP)
    # Where the gradients lie is not our question: that rule is left out.
    assert codes(again, ran) <= {"RHP812"} | codes(without(plan, keep, STEP), ran)
    assert kept_by(again) == set(keep)
    assert set(work_of(again).values()) <= {1}
    assert again.groups == plan.groups
    assert (again.reconfigure, again.standby, again.lost) == (
        plan.reconfigure,
        plan.standby,
        plan.lost,
    )
    filtered_s = computed_s(without(plan, keep, STEP), pricing)
    assert computed_s(again, pricing) <= filtered_s * (1 + ROUNDING)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4)])
def test_a_replica_that_is_done_helps_the_one_that_is_not(tp: int, pp: int):
    """All micro-batches of one are kept: each runs a part of the others at every stage, and it
    takes less time."""
    plan = plan_of(tp, pp, 2, 4)
    pricing = pricing_for(plan, frozenset())
    keep = [MicroBatch(0, number) for number in range(4)]
    again = redone(plan, pricing, keep, STEP)
    for of_stage in weights_run_at(again).values():
        assert sorted(of_stage) == [MicroBatch(1, number) for number in range(4)]
        assert set(of_stage.values()) == {0, 1}
    assert codes(again, plan) == set()
    filtered_s = computed_s(without(plan, keep, STEP), pricing)
    assert computed_s(again, pricing) < 0.8 * filtered_s


def test_where_all_is_kept_nothing_runs_but_the_end():
    """Every group reduces and steps."""
    plan = plan_of()
    again = redone(plan, pricing_for(plan, frozenset()), all_of(plan), STEP)
    assert num_kept(again) == 8
    ops = {instr.op for stream in again.streams for instr in stream.body}
    assert ops == {Op.REDUCE_GRADS, Op.STEP}
