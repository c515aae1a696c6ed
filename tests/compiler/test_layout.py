"""The healthy plan: numbering of ranks, split of layers, refusal of what cannot be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import findings, model_of, plan_of

from resihp.compiler import SCHEDULES, facts_of, initial_plan, split_layers
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Mesh


def test_ranks_are_numbered_tp_fastest_then_stage_then_replica():
    """Rank (replica * pp + stage) * tp + i is member i."""
    plan = plan_of(tp=2, pp=3, dp=2)
    assert [group.ranks for group in plan.groups] == [
        (0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11),
    ]  # fmt: skip
    assert [group.name for group in plan.groups[2:4]] == [(0, 2), (1, 0)]


@given(st.integers(1, 12), st.integers(0, 30))
def test_layers_are_contiguous_complete_and_even(num_stages, more):
    """Every layer is in one stage, in order; no stage has two more than another."""
    ranges = split_layers(num_stages + more, num_stages)
    assert ranges[0].first == 0
    assert ranges[-1].last == num_stages + more - 1
    assert all(a.last + 1 == b.first for a, b in pairwise(ranges))
    counts = [r.last - r.first + 1 for r in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_left_over_layers_go_to_the_middle_then_to_the_first_stage():
    """The ends have the embedding and the head beside their layers."""
    assert [r.last - r.first + 1 for r in split_layers(6, 4)] == [1, 2, 2, 1]
    assert [r.last - r.first + 1 for r in split_layers(7, 4)] == [2, 2, 2, 1]
    assert [r.last - r.first + 1 for r in split_layers(5, 2)] == [3, 2]


def test_more_stages_than_layers_are_refused():
    """The message names the most stages that the model has layers for."""
    with pytest.raises(UserError, match=r"7 stages: .* the model has 6; nearest valid: 6"):
        initial_plan(model_of(), Mesh(tp=1, pp=7, dp=1), Batch(microbatches=1, tokens=8))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 2), (4, 3, 1), (8, 1, 3), (1, 6, 2)]
)
def test_the_verifier_has_nothing_against_a_healthy_plan(tp, pp, dp, microbatches, schedule):
    """No error and no warning, over degrees, micro-batches and schedules."""
    assert findings(plan_of(tp, pp, dp, microbatches, schedule)) == []


def test_the_same_job_gives_the_same_plan():
    """Nothing depends on chance or on the order of sets."""
    assert plan_of() == plan_of()


def test_a_device_that_is_too_small_is_refused_in_one_sentence():
    """The message names the group and both sizes."""
    plan = plan_of()
    state = facts_of(plan).stages[plan.groups[0].name][0].state_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_of(memory_bytes=state)
    message = str(caught.value)
    assert message.startswith("dp0.pp0 (layers 0..2, TP 2) needs ")
    assert message.endswith("MiB on each rank and a device has 1.637 MiB")


def test_the_smallest_memory_that_is_accepted_is_what_the_verifier_asks_for():
    """Compiler and verifier count alike: one byte less and both refuse."""
    enough = next(size for size in range(1, 1 << 12) if fits(size << 12)) << 12
    assert findings(plan_of(memory_bytes=enough)) == []
    assert not fits(enough - (1 << 12))


def fits(memory_bytes: int) -> bool:
    try:
        plan_of(memory_bytes=memory_bytes)
    except NoFeasiblePlan:
        return False
    return True
