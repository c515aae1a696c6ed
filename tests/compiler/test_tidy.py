"""What a search moved and need not have is undone, and no plan gets longer for it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from planned_orders import check_orders
from problem_cases import problem, random_problem, replica

from resihp.compiler.planner.climb import climb
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import GREEDY, Item, Planned
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import fits, replay, stage_ends
from resihp.compiler.planner.tidy import Ways, tidied

WAYS = Ways((None,), (GREEDY,))
ENOUGH = 1 << 40


def random_plan(given: Problem, rng: random.Random) -> Planned:
    """Everything anywhere, then some tries to make it shorter."""
    placing = {}
    for home in range(len(given.replicas)):
        for number in range(given.num_microbatches):
            for stage in range(given.num_stages):
                holders = [d for d, row in enumerate(given.replicas) if row.chunks[stage]]
                taker = home if home in holders and rng.random() < 0.6 else rng.choice(holders)
                if taker != home:
                    placing.setdefault((home, number), {})[stage] = taker
    planned = Engine(given, placing).run()
    return climb(given, planned, WAYS.bounds, WAYS.styles, 30, 0) if planned.complete else planned


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_no_exchange_is_left_that_could_be_undone(seed):
    """Two micro-batches at each other's home: with both back some stage would end later."""
    rng = random.Random(seed)
    given = random_problem(rng)
    planned, _ = tidied(given, random_plan(given, rng), WAYS, ENOUGH)
    if not planned.complete:
        return
    ends = stage_ends(given, planned)
    assert ends is not None
    for one, where in planned.placing.items():
        for other, back in planned.placing.items():
            for stage, taker in where.items():
                if taker == other[0] and back.get(stage) == one[0]:
                    undone = stage_ends(given, with_names_changed(planned, one, other, stage))
                    assert undone is None or any(map(int.__gt__, undone, ends))


def with_names_changed(planned: Planned, one: Item, other: Item, stage: int) -> Planned:
    """At `stage`, `one` wherever `other` was and the other way round."""
    names = {one: other, other: one}
    orders = {}
    for d, rows in planned.orders.items():
        new = []
        for op, home, number in rows[stage]:
            item = d if home < 0 else home, number
            new_home, new_number = names.get(item, item)
            new.append((op, -1 if new_home == d else new_home, new_number))
        orders[d] = (*rows[:stage], tuple(new), *rows[stage + 1 :])
    return planned._replace(orders=orders)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 1_000, ENOUGH]))
def test_a_tidy_plan_is_right_and_no_longer_and_moves_no_more(seed, budget):
    """It fits into memory, and no stage ends later unless all is over earlier."""
    rng = random.Random(seed)
    given = random_problem(rng)
    before = random_plan(given, rng)
    after, num_played = tidied(given, before, WAYS, budget)
    if not before.complete:
        assert (after, num_played) == (before, 0)
        return
    check_orders(given, after)
    assert fits(given, after)
    makespan = replay(given, after)
    assert makespan is not None
    assert makespan <= after.makespan <= before.makespan
    assert after.num_moved <= before.num_moved
    if after.makespan == before.makespan:
        assert not any(map(int.__gt__, after.ends, before.ends))


def test_replicas_that_are_alike_run_their_own():
    """All that was exchanged goes back."""
    given = problem([replica(3)] * 2, 4)
    placing = {(0, 1): {1: 1}, (1, 2): {1: 0}, (0, 3): {0: 1, 1: 1}, (1, 0): {0: 0, 1: 0}}
    planned, _ = tidied(given, Engine(given, placing).run(), WAYS, ENOUGH)
    assert planned.placing == {}
    assert planned.makespan == Engine(given, {}).run().makespan


def test_a_plan_in_which_nothing_need_not_move_is_left_alone():
    """Nothing is played for it."""
    given = problem([replica(2, dead=(1,)), replica(2)], 4)
    planned = Engine(given, {(0, number): {1: 1} for number in range(4)}).run()
    assert tidied(given, planned, WAYS, ENOUGH) == (planned, 0)
