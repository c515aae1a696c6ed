"""No policy has a faster plan than ours; `make never-worse` looks at far more states."""

from __future__ import annotations

import pytest
from failure_states import adapted_state, failure_state, told

from resihp.compiler.adaptation import Situation
from resihp.compiler.policies import POLICIES, outcomes

ONCE_WORSE = ("10", "17", "21", "26", "45", "58", "747")
"""States in which another policy once had a faster plan."""


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_policy_has_a_faster_plan(first):
    """Random failures of real models on real clusters, ten at a time."""
    for index in range(first, first + 10):
        assert_never_worse(failure_state(f"suite {index}"), f"suite {index}")


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_no_policy_has_a_faster_plan_for_a_job_that_was_adapted_before(first):
    """Chains of failures, with other schedules, in fp32 and where memory is short."""
    for index in range(first, first + 8):
        assert_never_worse(adapted_state(f"suite {index}"), f"suite {index}")


@pytest.mark.parametrize("index", ONCE_WORSE)
def test_where_a_policy_was_faster_it_is_no_more(index):
    """Found by the benchmark, mended since."""
    assert_never_worse(failure_state(f"0 {index}"), f"0 {index}")


def assert_never_worse(situation: Situation, seed: str) -> None:
    found = {outcome.name: outcome for outcome in outcomes(situation, POLICIES)}
    ours = found["resihp"].iteration_s or float("inf")
    for name, outcome in found.items():
        if outcome.plan is not None:
            assert outcome.iteration_s is not None
            assert ours <= outcome.iteration_s * (1 + 1e-9), f"{seed}: {told(situation)}: {name}"
