"""Each schedule has the bubble and the memory that are published for it.

P positions, M micro-batches, F, B and W in ticks of one stage, V stages per position. A bubble is
what a position idles between its first and its last work, and its published value that of the
worst position; with a step that all wait for, an iteration lasts as long as from the first start
to the last end, which is told apart where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from plan_cases import spans

from resihp.compiler.schedules import schedule_order
from resihp.ir.model import Op

COSTS = [(10, 10, 10), (9, 10, 6), (10, 20, 10), (10, 14, 8), (10, 30, 10)]
"""F, B, W with W <= F <= B, for which the formulas are stated."""
SIZES = [(1, 4), (2, 4), (3, 6), (4, 8), (4, 12), (8, 24)]


class Bubble(NamedTuple):
    """Ticks beside the work of a position."""

    span: int
    """Of the position that idles most between its first and its last work."""
    iteration: int
    """From the first start to the last end."""


def bubble(kind: str, p: int, m: int, costs: Sequence[int], num_chunks: int = 1) -> Bubble:
    """Of the order, played."""
    f, b, w = costs
    cost = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}
    orders = schedule_order(kind, p, m, num_chunks if num_chunks > 1 else None)
    played = spans(orders, cost)
    work = num_chunks * m * sum(costs)
    return Bubble(
        max(end - begin for begin, end in played) - work, max(end for _, end in played) - work
    )


def peaks(kind: str, p: int, m: int, num_chunks: int | None = None) -> list[int]:
    """Most micro-batches between F and W of each position's stages at once."""
    found: list[int] = []
    for order in schedule_order(kind, p, m, num_chunks):
        alive = peak = 0
        for work in order:
            alive += {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}[work.op]
            peak = max(peak, alive)
        found.append(peak)
    return found


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_wait_for_p_minus_1_micro_batches(kind, p, m, costs):
    """(P - 1)(F + B + W)."""
    assert bubble(kind, p, m, costs) == ((p - 1) * sum(costs),) * 2


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
def test_zb_h1_fills_two_w_of_each(p, m, costs):
    """(P - 1)(F + B - W): all stages end at once."""
    f, b, w = costs
    assert bubble("zb-h1", p, m, costs) == ((p - 1) * (f + b - w),) * 2


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
def test_zb_h2_fills_three(p, m, costs):
    """(P - 1)(F + B - 2 W), and an iteration lasts as long as the last stage waits for its first F.

    No iteration can be shorter than that.
    """
    f, b, w = costs
    found = bubble("zb-h2", p, m, costs)
    assert found.span == (p - 1) * (f + b - 2 * w)
    assert found.iteration == max(found.span, (p - 1) * f)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("kind", ["interleaved-1f1b", "looped-bfs"])
def test_stages_of_a_vth_have_a_vth_of_the_bubble(kind, p, m, costs, num_chunks):
    """(P - 1)(F + B + W) of stages that are V times smaller."""
    if m % p == 0:
        assert bubble(kind, p, m, costs, num_chunks).iteration == (p - 1) * sum(costs)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zbv_has_no_bubble_at_equal_costs(p, m):
    """Each position works without a gap; the last one begins P - 1 units late."""
    assert bubble("zbv", p, m, (10, 10, 10), 2) == (0, 10 * (p - 1))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_memory_is_what_is_published(p, m):
    """In activations of a stage, which are V times smaller where there are V of them."""
    assert peaks("gpipe", p, m) == [m] * p
    assert peaks("1f1b", p, m) == [p - s for s in range(p)]
    assert peaks("zb-h1", p, m) == [p] * p
    assert peaks("zb-h2", p, m) == [2 * p - 1] * p
    assert peaks("zbv", p, m) == [2 * p] * p
    assert peaks("interleaved-1f1b", p, m)[0] == 2 * (p - 1) + p + 1
