"""The score of a run: every violation is seen, and nothing else is called one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.chaos.reference import difference, reference_of
from resihp.chaos.score import RunScore, judged, num_calm, percentile, total
from resihp.chaos.usage import Usage, growth_of, tagged, usage_of

STEPS = 6
METRICS = [{"step": s, "loss": 5.0 - s / 10, "iteration_s": 0.5} for s in range(STEPS)]
LEDGER = [{"step": s, "samples": [2 * s, 2 * s + 1]} for s in range(STEPS)]
EVENTS: list[dict[str, Any]] = [
    {"event": "running", "at_s": 10.0},
    {"event": "incident", "detection_ms": 80.0, "recovery_ms": 300.0, "lost_work_s": 0.4},
    {"event": "stop", "reason": "finished"},
]


def score(**changed: Any) -> RunScore:
    given: dict[str, Any] = {
        "events": EVENTS,
        "metrics": METRICS,
        "ledger": LEDGER,
        "reference": reference_of(METRICS, LEDGER, None),
        "exit_code": 0,
        "faults": {"kill": 1},
        "growth": {"fds": 0, "threads": 0, "rss_mib": 0.0},
        "left_behind": [],
        "ended_s": 16.0,
    }
    return judged(0, **{**given, **changed})


def test_a_good_run_has_no_violation():
    """Times are those of its incidents."""
    run = score()
    assert run.violations == []
    assert (run.detection_ms, run.recovery_ms, run.lost_work_s) == ([80.0], [300.0], 0.4)
    assert (run.running_s, run.useful_s, run.num_bitwise) == (6.0, 3.0, STEPS)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"exit_code": 1}, "ended with 1"),
        ({"exit_code": -9, "ended": "no step for 120 s"}, "no step for 120 s"),
        ({"ledger": [*LEDGER[:2], {"step": 2, "samples": [4, 4]}, *LEDGER[3:]]}, "1 samples lost"),
        ({"ledger": [*LEDGER[:2], {"step": 2, "samples": [4, 4]}, *LEDGER[3:]]}, "1 doubled"),
        ({"ledger": [*LEDGER[:2], *LEDGER[3:]]}, "2 samples lost"),
        ({"events": [*EVENTS, {"event": "stop", "reason": "replicas differ"}]}, "1 hash mismatch"),
        ({"metrics": [*METRICS[:5], {**METRICS[5], "loss": 4.6}]}, "a loss differs by 2.2e-02"),
        ({"metrics": [*METRICS[:5], {**METRICS[5], "loss": float("nan")}]}, "a loss differs"),
        ({"growth": {"fds": 100}}, "fds of a process grew by 100"),
        ({"left_behind": ["process 7"]}, "left behind: process 7"),
    ],
)
def test_what_must_not_be_is_said(changed: dict[str, Any], said: str):
    """One for each thing that can be wrong."""
    assert any(said in each for each in score(**changed).violations)


def test_a_step_that_was_taken_back_counts_once():
    """Where state went back to an older version, the newest row of a step is the one that holds."""
    again = [*LEDGER[:4], *LEDGER[3:]]
    assert score(ledger=again, metrics=[*METRICS[:4], *METRICS[3:]]).violations == []


def test_losses_may_differ_as_far_as_rounding_takes_them():
    """Ten times the largest difference so far of a run that only adds in another order."""
    reordered = [{**row, "loss": row["loss"] * (1 + 1e-6 * row["step"])} for row in METRICS]
    reference = reference_of(METRICS, LEDGER, reordered)
    for factor, is_right in ((3e-5, True), (6e-5, False)):
        metrics = [*METRICS[:5], {**METRICS[5], "loss": METRICS[5]["loss"] * (1 + factor)}]
        assert (score(metrics=metrics, reference=reference).violations == []) == is_right
    early = [{**METRICS[0], "loss": METRICS[0]["loss"] * (1 + 3e-5)}, *METRICS[1:]]
    assert score(metrics=early, reference=reference).violations != []


@pytest.mark.parametrize(
    ("faults", "calm"), [((), 0), ((0,), 1), ((2, 0, 0), 2), ((0, 3), 0), ((0, 0), 2)]
)
def test_jobs_that_no_fault_struck_are_counted_from_the_last(faults: Sequence[int], calm: int):
    """A trace may have a gap longer than a job."""
    assert num_calm([score(faults={"kill": num} if num else {}) for num in faults]) == calm


def test_losses_that_training_makes_of_rounding_alone_are_not_compared():
    """From where two runs without faults are far apart; those before are."""
    apart = [{**row, "loss": row["loss"] * (1 + (row["step"] > 2) * 1e-3)} for row in METRICS]
    reference = reference_of(METRICS, LEDGER, apart)
    late = [*METRICS[:5], {**METRICS[5], "loss": METRICS[5]["loss"] * 1.5}]
    run = score(metrics=late, reference=reference)
    assert (run.violations, run.num_steps_compared) == ([], 3)
    broken = [*METRICS[:5], {**METRICS[5], "loss": float("nan")}]
    assert score(metrics=broken, reference=reference).violations != [], "no rounding does that"
    early = [*METRICS[:2], {**METRICS[2], "loss": METRICS[2]["loss"] * (1 + 3e-6)}, *METRICS[3:]]
    assert score(metrics=early, reference=reference).violations != []


def test_a_loss_that_is_not_finite_differs_from_every_other():
    """Unless both are not."""
    assert difference(None, 1.0) == difference(1.0, None) == float("inf")
    assert difference(None, None) == difference(2.0, 2.0) == 0.0


def test_a_run_that_ended_for_want_of_ranks_is_judged_by_its_steps():
    """It has fewer, and none of them may be wrong."""
    run = score(metrics=METRICS[:3], ledger=LEDGER[:3], exit_code=4)
    assert run.violations == []
    assert run.num_steps == 3


def test_the_total_is_that_of_all_runs():
    """Faults per hour, goodput and the worst of each."""
    runs = [score(), score(exit_code=4, faults={"kill": 2, "stop": 1}, growth={"fds": 3})]
    both = total(runs, seed=1, source="test", seconds=60.0)
    assert (both.num_faults, both.faults_per_hour, both.goodput) == (4, 240.0, 0.5)
    assert (both.num_finished, both.num_without_plan) == (1, 1)
    assert both.faults == {"kill": 3, "stop": 1}
    assert both.growth["fds"] == 3
    assert "VIOLATION" not in both.text
    assert msgspec.json.decode(msgspec.json.encode(both))["violations"] == []


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_passed_by_no_more_than_the_rest(values: Sequence[float], share: float):
    """It is one of the values, and the smallest that will do."""
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_growth_is_what_stays():
    """A peak that goes again is none."""
    flat = [Usage(10, 2, 50.0)] * 8
    peak = [*flat[:3], Usage(90, 30, 90.0), *flat[:4]]
    leak = [Usage(10 + i, 2, 50.0) for i in range(8)]
    assert growth_of({1: flat, 2: peak}, least=8) == (0, 0, 0.0)
    assert growth_of({1: flat, 2: leak}, least=8).fds == 3
    assert growth_of({1: leak}, least=9) == (0, 0, 0.0)


def test_processes_of_a_job_are_found_by_their_environment():
    """And what they take is read."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={"RESIHP_CHAOS_TEST": "here"},
    )
    try:
        assert process.pid in tagged("RESIHP_CHAOS_TEST=here")
        assert tagged("RESIHP_CHAOS_TEST=nowhere") == set()
        assert usage_of([process.pid])[process.pid].threads == 1
    finally:
        process.communicate()
    assert usage_of([process.pid]) == {}
