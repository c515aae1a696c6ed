"""The planner beside optima that a solver has proven (`optimality_gap.py --keep` writes them)."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import msgspec
import pytest

from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import fits, replay
from resihp.compiler.planner.search import search

PROVEN = msgspec.json.decode(
    Path(__file__).with_name("proven_optima.json").read_bytes(), type=list[tuple[Problem, int]]
)
"""Small failure states that are hard for a single play, with the least makespan there is."""


@pytest.fixture(scope="module")
def gaps() -> list[float]:
    """Of each state, of a plan that is complete, fits, and takes as long as it says."""
    found: list[float] = []
    for problem, optimum in PROVEN:
        planned, _ = search(problem)
        assert planned.complete
        assert fits(problem, planned)
        # Who waited on a whim may have waited for nothing: replayed, a plan can be shorter.
        replayed = replay(problem, planned)
        assert replayed is not None
        assert optimum <= replayed <= planned.makespan
        found.append(planned.makespan / optimum - 1)
    return found


def test_plans_of_hard_states_are_near_the_optimum(gaps):
    """On average within 2 %, and none further away than 8 %."""
    assert len(gaps) == 40
    assert mean(gaps) <= 0.02
    assert max(gaps) <= 0.08


def test_most_are_the_optimum(gaps):
    """More than half, although a single play finds none of them."""
    assert sum(gap == 0 for gap in gaps) >= len(gaps) // 2
