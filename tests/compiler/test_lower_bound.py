"""The bound by work and speed."""

from __future__ import annotations

import random
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from problem_cases import random_problem

from resihp.compiler.planner.lower_bound import least_largest_load, lower_bound
from resihp.compiler.planner.search import search


@given(st.integers(0, 10**9))
def test_no_plan_is_shorter_than_the_bound(seed):
    """Whatever is slow, missing or tight."""
    problem = random_problem(random.Random(seed))
    planned, _ = search(problem, budget=500)
    assert lower_bound(problem) <= planned.makespan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 6))
def test_the_least_largest_load_is_that_of_the_best_of_all_ways_to_share(costs, count):
    """All counts per worker, tried one after the other."""
    shares = (s for s in product(range(count + 1), repeat=len(costs)) if sum(s) == count)
    loads = (max(n * cost for n, cost in zip(share, costs, strict=True)) for share in shares)
    assert least_largest_load(costs, count) == min(loads)
