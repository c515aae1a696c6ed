"""The greedy player of pipelines, and the rules that move micro-batches between replicas."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_orders import check_orders
from problem_cases import ROOMY, problem, random_problem, replica
from slow_engine import SlowEngine

from resihp.compiler.planner.algorithm1 import progress_rule
from resihp.compiler.planner.balance import balanced, homeless_placed, spread
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import GREEDY, Planned, Style
from resihp.compiler.planner.problem import Capacity, Chunks, Problem, Replica, total
from resihp.compiler.schedules import schedule_order
from resihp.ir.model import Op


def set_all_apart(given: Problem) -> Problem:
    """The same problem with no two replicas equal: capacities that never matter differ."""

    def row(index: int, one: Replica) -> Replica:
        edges = (*one.edges, index)  # one more boundary, which no stage uses
        return one._replace(edges=edges)

    return given._replace(
        replicas=tuple(row(index, one) for index, one in enumerate(given.replicas))
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 16])
def test_a_healthy_pipeline_runs_1f1b(num_stages, num_microbatches):
    """With 1F1B's bound the player finds 1F1B's order."""
    rows = [replica(num_stages)] * 2
    planned = Engine(problem(rows, num_microbatches, split=False), {}).run()
    known = schedule_order("1f1b", num_stages, num_microbatches)
    assert [[(op, number) for op, _, number in order] for order in planned.orders[1]] == [
        [(work.op, work.microbatch) for work in order] for order in known
    ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_a_healthy_split_pipeline_is_as_fast_as_zb_h1(num_stages, num_microbatches):
    """(p - 1)(F + B - W) of bubble at equal costs: one chunk less than a stage."""
    planned = Engine(problem([replica(num_stages)], num_microbatches), {}).run()
    assert planned.makespan == 100 * (3 * num_microbatches + num_stages - 1)


@given(st.integers(0, 10**9))
def test_every_play_runs_everything_once_and_in_order(seed):
    """Whatever is slow, missing or tight."""
    rng = random.Random(seed)
    given = random_problem(rng)
    placing = rng.choice((homeless_placed, balanced))(given)
    rule = rng.choice((None, progress_rule(), progress_rule(1, guarded=False)))
    planned = Engine(given, placing, rule).run()
    assert planned.complete
    check_orders(given, planned)


@given(st.integers(0, 10**9))
def test_every_play_is_that_of_the_obvious_player(seed):
    """One heap of events, each replica for itself: the same orders, moves and times."""
    rng = random.Random(seed)
    given = random_problem(rng)
    placing = rng.choice((homeless_placed, balanced))(given)
    style = rng.choice(
        (GREEDY, Style(0.0), Style(0.5), Style(forward_first=True), Style(0.0, forward_first=True))
    )
    delta, guarded = rng.choice((None, 0, 1)), rng.random() < 0.6
    rule = None if delta is None else progress_rule(delta, guarded=guarded)
    planned = Engine(given, placing, rule, style).run()
    assert planned == SlowEngine(given, placing, style, delta, guarded=guarded).run()


@given(st.integers(0, 10**9))
def test_what_is_kept_is_run_by_nobody(seed):
    """All else once and in order, as by the obvious player."""
    rng = random.Random(seed)
    given = random_problem(rng)
    items = product(range(len(given.replicas)), range(given.num_microbatches))
    share = rng.random()
    given = given._replace(kept=frozenset(item for item in items if rng.random() < share))
    placing = rng.choice((homeless_placed, balanced))(given)
    rule = rng.choice((None, progress_rule()))
    planned = Engine(given, placing, rule).run()
    assert planned.complete
    check_orders(given, planned)
    delta = None if rule is None else 0
    assert planned == SlowEngine(given, placing, GREEDY, delta).run()


def test_what_is_left_is_shared_out():
    """One replica's micro-batches are all kept: it runs half of the other's at every stage."""
    kept = frozenset((0, number) for number in range(4))
    given = problem([replica(2)] * 2, 4)._replace(kept=kept)
    planned = Engine(given, balanced(given)).run()
    assert {d: [len(order) for order in row] for d, row in planned.orders.items()} == {
        0: [6, 6],
        1: [6, 6],
    }
    alone = Engine(given, homeless_placed(given)).run()
    assert planned.makespan < alone.makespan


@given(st.integers(0, 10**9), st.floats(0.5, 1.5))
def test_a_play_that_takes_too_long_is_given_up(seed, share):
    """Never one that ends in time."""
    rng = random.Random(seed)
    given = random_problem(rng)
    placing = rng.choice((homeless_placed, balanced))(given)
    planned = Engine(given, placing).run()
    limit = round(share * planned.makespan)
    in_time = planned.makespan <= limit
    assert Engine(given, placing).run_within(limit) == (planned if in_time else None)


@given(st.integers(0, 10**9))
def test_classes_change_nothing_but_the_time_that_planning_takes(seed):
    """Replicas that are alike, played as one or each for itself: the same orders."""
    rng = random.Random(seed)
    given = random_problem(rng)
    placing = rng.choice((homeless_placed, balanced))(given)
    together = Engine(given, placing).run()
    apart = Engine(set_all_apart(given), placing).run()
    assert together == apart


def test_many_equal_replicas_are_played_once():
    """128 healthy replicas share one order."""
    planned = Engine(problem([replica(4)] * 128, 8), {}).run()
    assert len({id(order) for order in planned.orders.values()}) == 1


@pytest.mark.parametrize("num_failures", [1, 2, 4])
def test_more_replicas_cost_nothing_once_there_are_enough_helpers(num_failures):
    """What is played follows what failed and who helps: the same chunks for 64 and 256 replicas."""

    def num_played(num_replicas: int) -> int:
        slow = [replica(4, slow={index % 4: 1.5}) for index in range(num_failures)]
        rows = [*slow, *[replica(4)] * (num_replicas - num_failures)]
        given = problem(rows, 8)
        engine = Engine(given, balanced(given))
        engine.run()
        return engine.num_started

    one = 3 * 4 * 8
    assert num_played(64) == num_played(256) <= (1 + num_failures * 5) * one


@given(st.integers(0, 10**9))
def test_a_play_costs_no_more_than_was_expected(seed):
    """Classes are played once, who gives or takes something alone."""
    rng = random.Random(seed)
    given = random_problem(rng)
    placing = rng.choice((homeless_placed, balanced))(given)
    engine = Engine(given, placing)
    engine.run()
    assert engine.num_started <= num_chunks(given, placing)


def test_the_work_of_a_lost_stage_goes_to_all_who_can_help():
    """Eight micro-batches of a dead stage: four each for two peers."""
    rows = [replica(2), replica(2, dead=(1,)), replica(2)]
    placing = homeless_placed(problem(rows, 8))
    assert Counter(stages[1] for stages in placing.values()) == {0: 4, 2: 4}
    assert {home for home, _ in placing} == {1}


def test_a_slow_worker_gives_away_until_more_would_not_help():
    """Half speed, one peer: a third of the micro-batches evens it out."""
    rows = [replica(3), replica(3, slow={1: 2.0})]
    given = problem(rows, 12)
    placing = balanced(given)
    assert {stage for stages in placing.values() for stage in stages} == {1}
    assert len(placing) == 4
    without = Engine(given, {}).run().makespan
    assert Engine(given, placing).run().makespan < 0.8 * without


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 10))
def test_the_balance_of_a_stage_is_the_best_there_is(costs, num_microbatches):
    """No counts of micro-batches per worker have a smaller largest load."""
    rows = [Replica((Chunks(cost, cost, cost),), (ROOMY,), ()) for cost in costs]
    given = problem(rows, num_microbatches)
    counts = [num_microbatches] * len(rows)
    for (home, _), stages in balanced(given).items():
        counts[home] -= 1
        counts[stages[0]] += 1
    largest = max(
        count * total(chunks)
        for count, row in zip(counts, rows, strict=True)
        for chunks in row.chunks
        if chunks is not None
    )
    # Below `largest` the workers together cannot take all micro-batches.
    capacity = sum((largest - 1) // (3 * cost) for cost in costs)
    assert capacity < num_microbatches * len(rows)


def test_read_literally_the_rule_makes_a_plan_worse_than_none():
    """What lags behind a slow stage is taken for slow as well, at the paper's delta."""
    rows = [replica(16), replica(16, slow={3: 1.6}), replica(16), replica(16)]
    given = problem(rows, 32)
    none = Engine(given, {}).run()
    literal = Engine(given, {}, progress_rule(guarded=False)).run()
    guarded = Engine(given, {}, progress_rule()).run()
    assert literal.makespan > none.makespan > guarded.makespan
    assert literal.num_moved > 10 * guarded.num_moved


@given(st.integers(0, 10**9), st.integers(0, 2))
def test_the_guard_knows_all_that_is_assigned(seed, delta):
    """Whoever receives a micro-batch has, with it, less work than the giver had."""
    given = random_problem(random.Random(seed))
    placing = homeless_placed(given)
    rule = progress_rule(delta)

    def load(engine: Engine, stage: int, replica: int) -> int:
        chunks = given.replicas[replica].chunks[stage]
        homes = range(len(given.replicas))
        runners = [
            engine.placing.get((home, number), {}).get(stage, home)
            for home in homes
            for number in range(given.num_microbatches)
        ]
        return 0 if chunks is None else runners.count(replica) * total(chunks)

    def checked(engine: Engine, stage: int) -> None:
        replicas = range(len(given.replicas))
        before = [load(engine, stage, replica) for replica in replicas]
        rule(engine, stage)
        changed = [(d, after) for d in replicas if (after := load(engine, stage, d)) != before[d]]
        if changed:
            giver, taker = sorted(changed, key=lambda each: each[1] - before[each[0]])
            assert taker[1] < before[giver[0]]

    Engine(given, placing, checked).run()


def test_one_micro_batch_of_a_stage_moves_at_a_step():
    """However far behind its replica is."""
    rows = [replica(1), replica(1, slow={0: 5.0})]
    given = problem(rows, 8)._replace(in_flight=None)
    moves: list[int] = []
    rule = progress_rule(guarded=False)

    def counted(engine: Engine, stage: int) -> None:
        before = len(engine.placing)
        rule(engine, stage)
        moves.append(len(engine.placing) - before)

    Engine(given, {}, counted).run()
    assert set(moves) == {0, 1}


def test_without_room_a_micro_batch_does_not_move():
    """The receiver's memory holds its own work only."""
    tight = Capacity(free=1, activation=1, released=1, held=0)
    rows = [replica(1, memory=tight), replica(1, slow={0: 3.0})]
    given = problem(rows, 4)._replace(in_flight=None)
    planned = Engine(given, {}, progress_rule()).run()
    assert planned.complete
    assert max_live(given, planned, 0) <= 1


def max_live(given: Problem, planned: Planned, d: int) -> int:
    """Most bytes that replica `d` had in use at its first stage."""
    sizes = given.replicas[d].memory[0]
    assert sizes is not None
    live = peak = 0
    for op, _, _ in planned.orders[d][0]:
        if op is Op.F:
            live += sizes.activation
        elif op is Op.B:
            live += sizes.held
        peak = max(peak, live)
        if op is Op.B:
            live -= sizes.released
        elif op is Op.W:
            live -= sizes.activation - sizes.released + sizes.held
    return peak


@given(st.integers(1, 40), st.data())
def test_spread_numbers_are_distinct_and_even(size, data):
    """Neighbours are as far from each other as others, but for rounding."""
    count = data.draw(st.integers(1, size))
    numbers = spread(size, count)
    assert len(set(numbers)) == count
    assert all(0 <= number < size for number in numbers)
    gaps = [after - before for before, after in pairwise(numbers)]
    assert not gaps or max(gaps) - min(gaps) <= 1
