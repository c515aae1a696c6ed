"""Orders of the named schedules among what a search looks at."""

from __future__ import annotations

import random

import pytest
from problem_cases import problem, replica

from resihp.compiler.planner.named import named_plans
from resihp.compiler.planner.problem import Capacity, Problem
from resihp.compiler.planner.replay import fits, replay
from resihp.compiler.planner.search import search

BUDGET = 10_000


def state(seed: int) -> Problem:
    """Replicas that have all stages, of which some are slow or short of memory."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.choice((2, 4, 6, 8)), rng.choice((4, 8, 12, 16))
    num_replicas = rng.choice((1, 2, 3))
    memory = Capacity(
        free=rng.randint(num_stages, 3 * num_stages) * 4,
        activation=4,
        released=rng.choice((0, 2, 3)),
        held=rng.choice((0, 1)),
    )
    rows = [
        replica(
            num_stages,
            edge=rng.choice((0, 5, 30)),
            memory=memory,
            slow={rng.randrange(num_stages): rng.choice((1.2, 1.5))} if rng.random() < 0.5 else {},
        )
        for _ in range(num_replicas)
    ]
    return problem(rows, num_microbatches)


@pytest.mark.parametrize("seed", [1, 39, 73, 75, 131])
def test_a_search_finds_nothing_longer_than_a_named_schedule(seed):
    """In 39 and 75 plays alone did."""
    given = state(seed)
    named = list(named_plans(given, BUDGET))
    assert named
    found, _ = search(given, budget=BUDGET, least_plays=1)
    assert found.makespan <= min(each.makespan for each in named)


@pytest.mark.parametrize("split", [True, False])
def test_named_plans_are_timed_and_fit(split):
    """B and W apart or not, as the problem says."""
    given = state(39)._replace(split=split)
    named = list(named_plans(given, BUDGET))
    assert named
    for each in named:
        assert replay(given, each) == each.makespan == max(each.ends)
        assert fits(given, each)


def test_where_a_stage_is_lacking_there_is_no_named_plan():
    """Nor where the job is so large that it is not worth it."""
    lacking = problem([replica(2), replica(2, dead=(1,))], 4)
    assert not list(named_plans(lacking, BUDGET))
    assert not list(named_plans(problem([replica(2)], 4), 3 * 2 * 4 - 1))
