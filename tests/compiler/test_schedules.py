"""Orders of work: complete, bounded in memory, and as fast as published."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import makespan

from resihp.compiler import SCHEDULES, Work, schedule_order
from resihp.errors import UserError
from resihp.ir.model import Op

kinds = st.sampled_from(SCHEDULES)
stages = st.integers(1, 8)
counts = st.integers(1, 20)


def peak_in_flight(order: list[Work]) -> int:
    """Most micro-batches between their F and their W at once."""
    alive = peak = 0
    for work in order:
        alive += {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}[work.op]
        peak = max(peak, alive)
    return peak


@given(kinds, stages, counts)
def test_each_stage_runs_each_micro_batch_once_in_order(kind, num_stages, num_microbatches):
    """Every micro-batch has F, then B, then W (or F, then BW) on every stage."""
    orders = schedule_order(kind, num_stages, num_microbatches)
    assert len(orders) == num_stages
    backward = (Op.F, Op.B, Op.W) if kind == "zb-h1" else (Op.F, Op.BW)
    for order in orders:
        assert len(order) == len(set(order)) == len(backward) * num_microbatches
        for number in range(num_microbatches):
            assert [w.op for w in order if w.microbatch == number] == list(backward)


@given(kinds, stages, counts)
def test_neighbours_agree_on_the_order_of_what_crosses(kind, num_stages, num_microbatches):
    """Forwards and backwards are in order of number, so channels deliver in the order of use."""
    for order in schedule_order(kind, num_stages, num_microbatches):
        for ops in ({Op.F}, {Op.B, Op.BW}):
            numbers = [w.microbatch for w in order if w.op in ops]
            assert numbers == sorted(numbers)


@given(kinds, stages, counts)
def test_no_order_waits_for_ever(kind, num_stages, num_microbatches):
    """The simulation comes to an end (it asserts so)."""
    assert makespan(schedule_order(kind, num_stages, num_microbatches)) > 0


@given(stages, counts)
def test_1f1b_keeps_fewer_in_flight_the_later_the_stage(num_stages, num_microbatches):
    """Stage s has at most P - s micro-batches between F and BW."""
    for stage, order in enumerate(schedule_order("1f1b", num_stages, num_microbatches)):
        assert peak_in_flight(order) == min(num_stages - stage, num_microbatches)


@given(stages, counts)
def test_zb_h1_keeps_at_most_the_first_stage_of_1f1b_in_flight(num_stages, num_microbatches):
    """No stage has more than P micro-batches between F and W."""
    for order in schedule_order("zb-h1", num_stages, num_microbatches):
        assert peak_in_flight(order) <= min(num_stages, num_microbatches)


@given(stages, counts)
def test_bubbles_are_the_published_ones(num_stages, num_microbatches):
    """Beside 3 M units of work: 3 (P - 1) for GPipe and 1F1B, P - 1 for ZB-H1 once M >= P."""
    work = 3 * num_microbatches
    for kind in ("gpipe", "1f1b"):
        orders = schedule_order(kind, num_stages, num_microbatches)
        assert makespan(orders) == work + 3 * (num_stages - 1)
    zero_bubble = makespan(schedule_order("zb-h1", num_stages, num_microbatches))
    short = max(0, num_stages - num_microbatches)
    assert zero_bubble == work + (num_stages - 1) + short


def shortest(num_stages: int, num_microbatches: int) -> int:
    """The best makespan of any order of F, B, W with at most P in flight: breadth-first search."""
    start = ((0, 0, 0),) * num_stages
    goal = ((num_microbatches,) * 3,) * num_stages
    frontier, time = {start}, 0
    while goal not in frontier:
        frontier = {after for state in frontier for after in one_unit(state, num_microbatches)}
        time += 1
    return time


def one_unit(state: tuple[tuple[int, int, int], ...], num_microbatches: int):
    """All states after one unit of time, each stage running one chunk or idling."""
    options = []
    for stage, (f, b, w) in enumerate(state):
        here = [(f, b, w)]
        inputs = state[stage - 1][0] if stage else num_microbatches
        grads = state[stage + 1][1] if stage + 1 < len(state) else f
        if f < inputs and f - w < len(state):
            here.append((f + 1, b, w))
        if b < min(grads, f):
            here.append((f, b + 1, w))
        if w < b:
            here.append((f, b, w + 1))
        options.append(here)
    return product(*options)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 3)]
)
def test_no_order_within_the_same_memory_beats_zb_h1(num_stages, num_microbatches):
    """At unit costs an exhaustive search finds nothing shorter."""
    orders = schedule_order("zb-h1", num_stages, num_microbatches)
    assert makespan(orders) == shortest(num_stages, num_microbatches)


def test_an_unknown_schedule_is_refused_with_the_nearest_name():
    """The user learns which schedules there are."""
    with pytest.raises(UserError) as caught:
        schedule_order("1f1bb", 2, 2)
    assert str(caught.value) == (
        "schedule '1f1bb' is none of 1f1b, gpipe, zb-h1; did you mean 1f1b?"
    )
