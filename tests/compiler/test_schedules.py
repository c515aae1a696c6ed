"""Orders of work: complete, bounded in memory, and as fast as published."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import ONE_STAGE_SCHEDULES, makespan

from resihp.compiler import SCHEDULES, Work, schedule_order
from resihp.compiler.schedules import AUTOMATIC, placed
from resihp.errors import UserError
from resihp.ir.model import Op

kinds = st.sampled_from(ONE_STAGE_SCHEDULES)
stages = st.integers(1, 8)
counts = st.integers(1, 20)


@st.composite
def sizes(draw) -> tuple[str, int, int, int | None]:
    """Arguments of `schedule_order`: any schedule with stages as it can have them."""
    kind = draw(st.sampled_from([kind for kind in SCHEDULES if kind not in AUTOMATIC]))
    chunks = st.integers(1, 4) if kind in ("interleaved-1f1b", "looped-bfs") else st.none()
    return kind, draw(stages), draw(counts), draw(chunks)


def peak_in_flight(order: list[Work]) -> int:
    """Most micro-batches between their F and their W at once."""
    alive = peak = 0
    for work in order:
        alive += {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}[work.op]
        peak = max(peak, alive)
    return peak


@given(sizes())
def test_each_stage_runs_each_micro_batch_once_in_order(size):
    """Every micro-batch has F, then B, then W (or F, then BW) at every stage, where it stands."""
    kind, num_positions, num_microbatches, num_chunks = size
    orders = schedule_order(kind, num_positions, num_microbatches, num_chunks)
    held = placed(kind, num_positions, num_chunks)
    backward = (Op.F, Op.B, Op.W) if kind.startswith("zb") else (Op.F, Op.BW)
    for order, here in zip(orders, held, strict=True):
        works = {(w.stage, w.microbatch) for w in order}
        assert works == set(product(here, range(num_microbatches)))
        for work in works:
            assert [w.op for w in order if w[1:] == work] == list(backward)


@given(kinds, stages, counts)
def test_neighbours_agree_on_the_order_of_what_crosses(kind, num_stages, num_microbatches):
    """Forwards and backwards are in order of number, so channels deliver in the order of use."""
    for order in schedule_order(kind, num_stages, num_microbatches):
        for ops in ({Op.F}, {Op.B, Op.BW}):
            numbers = [w.microbatch for w in order if w.op in ops]
            assert numbers == sorted(numbers)


@given(sizes())
def test_no_order_waits_for_ever(size):
    """The simulation comes to an end (it asserts so), whatever the number of micro-batches."""
    assert makespan(schedule_order(*size)) > 0


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
def test_zbv_keeps_as_much_in_flight_everywhere_as_1f1b_at_its_first_stage(
    num_positions, num_microbatches
):
    """P micro-batches at one of P stages are 2 P at one of 2 P stages that are half as large."""
    for order in schedule_order("zbv", num_positions, num_microbatches):
        assert peak_in_flight(order) <= min(2 * num_positions, 2 * num_microbatches)


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


@given(stages, st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(
    num_positions, num_chunks, num_rounds
):
    """In units of a chunk 3 (P - 1) remain: a V-th of those of 1F1B, whose chunks are V-fold."""
    num_microbatches = num_rounds * num_positions
    orders = schedule_order("interleaved-1f1b", num_positions, num_microbatches, num_chunks)
    assert makespan(orders) == 3 * num_chunks * num_microbatches + 3 * (num_positions - 1)


@given(stages, counts)
def test_zbv_has_no_bubble_but_the_one_of_its_start(num_positions, num_microbatches):
    """At equal costs 6 M units of work and P - 1 of waiting for the first input."""
    num_microbatches += 2 * num_positions - 1
    orders = schedule_order("zbv", num_positions, num_microbatches)
    assert makespan(orders) == 6 * num_microbatches + num_positions - 1


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
        "schedule '1f1bb' is none of 1f1b, gpipe, interleaved-1f1b, looped-bfs, zb-auto, zb-h1, "
        "zb-h2, zbv; did you mean 1f1b?"
    )


@pytest.mark.parametrize(
    ("kind", "num_chunks", "valid"), [("1f1b", 2, 1), ("zb-h1", 3, 1), ("zbv", 3, 2), ("zbv", 0, 2)]
)
def test_a_number_of_stages_that_a_schedule_does_not_have_is_refused(kind, num_chunks, valid):
    """The user learns how many it has."""
    with pytest.raises(UserError, match=f"{num_chunks} stages per position.*valid: {valid}"):
        schedule_order(kind, 4, 8, num_chunks)
