"""Automatic zero bubble: no longer than what is published, near the optimum, within memory."""

from __future__ import annotations

import random
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, plan_of
from problem_cases import random_problem, replica

from resihp.compiler import home_work, initial_plan, lower, ordered
from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel, Lengths
from resihp.compiler.models import find_model
from resihp.compiler.planner.automatic import automatic
from resihp.compiler.planner.engine import Planned
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.problem import Capacity, Chunks, Problem, Replica, total
from resihp.compiler.planner.replay import fits, planned_of, replay
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import schedule_order
from resihp.compiler.simulate import simulate
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Group, Mesh, Op, Plan


def pipeline(rng: random.Random) -> Problem:
    """One replica with all stages of a random problem."""
    while True:
        given = random_problem(rng)
        whole = [row for row in given.replicas if None not in row.chunks]
        if whole:
            return given._replace(replicas=(rng.choice(whole),))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_it_is_never_longer_than_a_named_schedule_that_fits(seed):
    """Slow stages, hops, tight memory; everything runs once, in order."""
    given = pipeline(random.Random(seed))
    planned = automatic(given, budget=5_000)
    assert planned.complete
    assert fits(given, planned)
    assert replay(given, planned) == planned.makespan >= lower_bound(given._replace(split=True))
    for order in planned.orders[0]:
        assert sum(op is not Op.W for op, _, _ in order) == 2 * given.num_microbatches
    for kind in ("1f1b", "zb-h1", "zb-h2"):
        orders = schedule_order(kind, given.num_stages, given.num_microbatches)
        known = planned_of(given, orders)
        assert known is None or planned.makespan <= known.makespan


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_it_is_chosen_by_the_costs_of_each_micro_batch_where_they_differ(seed):
    """Never longer than the named schedules at these costs either."""
    rng = random.Random(seed)
    given = pipeline(rng)
    row = given.replicas[0]
    factors = [rng.choice((1, 2, 3)) for _ in range(given.num_microbatches)]

    def costs(_replica: int, stage: int, item: tuple[int, int]) -> Chunks:
        chunks = row.chunks[stage]
        assert chunks is not None
        return Chunks(*(ticks * factors[item[1]] for ticks in chunks))

    planned = automatic(given, costs, budget=5_000)
    assert replay(given, planned, costs) == planned.makespan
    for kind in ("1f1b", "zb-h1"):
        orders = schedule_order(kind, given.num_stages, given.num_microbatches)
        known = planned_of(given, orders)
        if known is not None:
            longest = replay(given, known, costs)
            assert longest is not None
            assert planned.makespan <= longest


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize("chunks", [(10, 10, 10), (9, 10, 6), (10, 14, 8)])
def test_with_the_memory_of_zb_h2_it_has_no_bubble_but_the_start(
    num_stages, num_microbatches, chunks
):
    """The published formula of ZB-H2, and the least there can be."""
    given = uniform(num_stages, num_microbatches, chunks, room=2 * num_stages - 1)
    least = num_microbatches * sum(chunks) + (num_stages - 1) * chunks[0]
    assert automatic(given).makespan == least


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize("chunks", [(10, 10, 10), (9, 10, 6), (10, 14, 8)])
def test_with_the_memory_of_1f1b_it_is_no_longer_than_zb_h1(num_stages, num_microbatches, chunks):
    """(P - 1)(F + B - W) or less."""
    given = uniform(num_stages, num_microbatches, chunks, room=num_stages)
    f, b, w = chunks
    bubble = automatic(given).makespan - num_microbatches * sum(chunks)
    assert bubble <= (num_stages - 1) * (f + b - w)


def test_it_knows_which_stage_is_slow():
    """An order for equal stages takes longer where the first one is at half speed."""
    memory = Capacity(5, 1, 0, 0)
    row = replica(4, (90, 100, 60), slow={0: 2.0}, memory=memory)
    given = Problem((row,), 12, (0,) * 3, split=True)
    blind = automatic(given._replace(replicas=(replica(4, (90, 100, 60), memory=memory),)))
    unaware = replay(given, blind)
    assert unaware is not None
    assert automatic(given).makespan < 0.98 * unaware


def uniform(num_stages: int, num_microbatches: int, chunks, room: int) -> Problem:
    """Stages that are alike, with room for so many activations between F and W."""
    row = replica(num_stages, chunks, memory=Capacity(room, 1, 0, 0))
    return Problem((row,), num_microbatches, (0,) * (num_stages - 1), split=True)


# --- against the optimum


def test_it_is_close_to_the_best_there_is():
    """Exhaustive search on random pipelines of two stages: at most 5 % longer, 1 % on average."""
    rng = random.Random(7)
    ratios: list[float] = []
    for _ in range(25):
        chunks = tuple(Chunks(*(rng.randint(1, 3) for _ in range(3))) for _ in range(2))
        memory = Capacity(rng.choice((2, 3, 6)), 1, 0, 0)
        row = Replica(chunks, (memory,) * 2, (0,))
        given = Problem((row,), rng.choice((2, 3, 4)), (0,), split=True)
        ratios.append(automatic(given).makespan / shortest(given))
    assert min(ratios) >= 1
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 1.01


_Stage = tuple[int, int, int, int, int]
"""F, B and W that are done; what runs (0 F, 1 B, 2 W, 3 nothing); its ticks left."""


def shortest(given: Problem) -> int:
    """The least makespan of any order, breadth first over everything that can be at each tick."""
    size = given.num_microbatches
    goal = ((size, size, size, 3, 0),) * given.num_stages
    frontier: set[tuple[_Stage, ...]] = {((0, 0, 0, 3, 0),) * given.num_stages}
    time = 0
    while goal not in frontier:
        frontier = {after for state in frontier for after in one_tick(given, state)}
        time += 1
    return time


def one_tick(given: Problem, state: tuple[_Stage, ...]):
    """All states a tick later: idle stages start something or wait, and all go on."""
    row, size = given.replicas[0], given.num_microbatches
    options: list[list[_Stage]] = []
    for stage, (f, b, w, runs, left) in enumerate(state):
        chunks, memory = row.chunks[stage], row.memory[stage]
        assert chunks is not None
        assert memory is not None
        here: list[tuple[int, int]] = [(runs, left)]
        if runs == 3:
            if f < (state[stage - 1][0] if stage else size) and f - w < memory.free:
                here.append((0, chunks[0]))
            if b < (state[stage + 1][1] if stage + 1 < len(state) else f):
                here.append((1, chunks[1]))
            if w < b:
                here.append((2, chunks[2]))
        options.append([ticked(f, b, w, op, ticks) for op, ticks in here])
    return product(*options)


def ticked(f: int, b: int, w: int, op: int, left: int) -> _Stage:
    """A stage one tick later."""
    if op == 3:
        return f, b, w, 3, 0
    if left > 1:
        return f, b, w, op, left - 1
    return f + (op == 0), b + (op == 1), w + (op == 2), 3, 0


# --- plans


def pricing_of(plan: Plan, **health) -> Pricing:
    """Of LLaMA-2 7B on the paper's cluster, for the shape of `plan`."""
    cluster = CLUSTERS["a100-32x8"]
    return Pricing(
        plan.model,
        CostModel.of_description(find_model("llama2-7b"), cluster),
        cluster,
        Health(**health),
    )


def smaller(plan: Plan, degrees: dict[tuple[int, int], int]) -> Plan:
    """Some groups have fewer ranks."""

    def cut(group: Group) -> Group:
        degree = degrees.get(group.name, group.tp)
        return msgspec.structs.replace(group, ranks=group.ranks[:degree])

    groups = tuple(map(cut, plan.groups))
    left = {rank for group in groups for rank in group.ranks}
    standby = tuple(rank for rank in range(plan.mesh.world) if rank not in left)
    return msgspec.structs.replace(plan, groups=groups, standby=standby)


@pytest.mark.parametrize("transport", ["edge", "rank"])
@pytest.mark.parametrize(
    ("degrees", "speed"),
    [
        ({}, {}),
        ({}, {2: 0.5}),
        ({(0, 1): 1}, {}),
        ({(0, 1): 1, (1, 2): 2}, {9: 0.4, 17: 0.8}),
    ],
)
def test_plans_with_slow_stages_and_mixed_degrees_are_verified(degrees, speed, transport):
    """And no slower than 1F1B and ZB-H1 when the lowered plans are simulated."""
    plan = smaller(plan_of(tp=4, pp=3, dp=2, microbatches=6, schedule="1f1b"), degrees)
    plan = msgspec.structs.replace(plan, transport=transport)
    pricing = pricing_of(plan, speed=speed)
    seconds: dict[str, float] = {}
    for kind in ("1f1b", "zb-h1", "zb-auto"):
        lowered = lower(ordered(plan, kind, home_work(range(2), 6), pricing))
        assert findings(lowered) == []
        seconds[kind] = simulate(lowered, pricing).iteration_s
    assert seconds["zb-auto"] <= min(seconds.values()) * 1.001


def test_replicas_with_more_work_have_an_order_of_their_own():
    """Six micro-batches here, two there."""
    plan = plan_of(tp=1, pp=2, dp=2, schedule="1f1b")
    work = home_work(range(2), 4)
    work[0] += [work[1].pop(), work[1].pop()]
    lowered = lower(ordered(plan, "zb-auto", work, pricing_of(plan)))
    assert findings(lowered) == []


def test_micro_batches_of_different_lengths_are_ordered_by_theirs():
    """One long document or many short ones: no slower than 1F1B and ZB-H1 at these lengths."""
    plan = plan_of(tp=2, pp=3, dp=2, microbatches=6, schedule="1f1b")
    pricing = pricing_of(plan)
    lengths = [Lengths.of([size] * (32 // size)) for size in (32, 1, 8, 32, 2)]
    tokens = [Lengths(each.tokens * 999, each.pairs * 999**2) for each in lengths]
    seconds: dict[str, float] = {}
    for kind in ("1f1b", "zb-h1", "zb-auto"):
        lowered = lower(ordered(plan, kind, home_work(range(2), 6), pricing, tokens))
        assert findings(lowered) == []
        seconds[kind] = simulate(lowered, pricing, lengths=tokens).iteration_s
    assert seconds["zb-auto"] <= min(seconds.values()) * 1.001


def test_less_memory_gives_an_order_that_needs_less():
    """Down to what 1F1B needs; below nothing fits."""
    roomy = automatic_plan(1 << 40)
    most = peak_of(roomy)
    tight = automatic_plan(most - 1)
    assert peak_of(tight) < most
    assert findings(tight) == []
    with pytest.raises(NoFeasiblePlan):
        automatic_plan(1 << 20)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-h2"])
def test_with_no_byte_more_than_a_named_order_needs_it_is_no_slower(kind):
    """Though the planner leaves more room for buffers than that order has."""
    known = automatic_plan(1 << 40, kind)
    made = automatic_plan(peak_of(known))
    assert findings(made) == []
    pricing = pricing_of(made)
    assert simulate(made, pricing).iteration_s <= simulate(known, pricing).iteration_s * 1.001


def automatic_plan(memory_bytes: int, schedule: str = "zb-auto") -> Plan:
    plan = plan_of(tp=1, pp=4, dp=1, microbatches=12, schedule="1f1b")
    return initial_plan(
        plan.model,
        Mesh(tp=1, pp=4, dp=1),
        Batch(microbatches=12, tokens=256),
        schedule=schedule,
        memory_bytes=memory_bytes,
        pricing=pricing_of(plan),
    )


def peak_of(plan: Plan) -> int:
    from resihp.compiler.facts import facts_of
    from resihp.ir.lanes import lanes_of
    from resihp.ir.verify.memory import peaks_of

    return max(peaks_of(lanes_of(plan), facts_of(plan)).values())


def test_without_memory_there_is_nothing_to_make_it_for():
    """The user learns what is missing."""
    with pytest.raises(UserError, match="no `memory` line; nearest valid: zb-h1"):
        plan_of(schedule="zb-auto", memory_bytes=None)
    with pytest.raises(UserError, match="no order of its own"):
        schedule_order("zb-auto", 2, 2)


def test_orders_that_wait_for_each_other_have_no_time():
    """Stage 0 wants the gradient of what it has not sent."""
    given = uniform(2, 1, (1, 1, 1), room=2)
    stuck = ((Op.B, -1, 0), (Op.F, -1, 0), (Op.W, -1, 0))
    right = ((Op.F, -1, 0), (Op.B, -1, 0), (Op.W, -1, 0))
    assert replay(given, Planned(0, {0: (stuck, right)}, {}, complete=True)) is None
    assert total(Chunks(1, 1, 1)) == 3
