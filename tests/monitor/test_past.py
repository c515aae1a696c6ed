"""What earlier coordinators left in a run's directory, torn rows included."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_cases import Desk

from resihp.monitor.memory import Memory
from resihp.monitor.run_dir import RunDir
from resihp.wire.messages import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5 - step,
        grad_norm=1.0,
        learning_rate=1e-3,
        skipped=step == 1,
        num_tokens=640,
        samples=(step, step + 1),
        duration_s=0.125,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir.make(tmp_path / "run")
    for step in range(3):
        made.step(record(step), generation=1)
    made.event("executor_started", {"rank": 1, "pid": 5}, 0.5)
    made.event("executor_started", {"rank": 1, "pid": 6}, 1.5)
    made.event("running", {"generation": 1, "hashes": {}}, 2.0)
    made.close()
    return made


def test_committed_steps_are_read_back(run_dir: RunDir):
    """As they were written, to the last digit."""
    past = run_dir.past()
    assert past.records == [record(step) for step in range(3)]
    assert past.memory == Memory(num_plans=1, executors={1: 6}, starting={1})


@pytest.mark.parametrize("num_bytes", [1, 10])
def test_a_row_that_is_not_whole_is_cut_off(run_dir: RunDir, num_bytes: int):
    """And with it the other row of its step, so that the next one follows on whole ones."""
    ledger = run_dir.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-num_bytes])
    assert run_dir.past().records == [record(0), record(1)]
    again = RunDir(run_dir.path)
    again.step(record(2), generation=1)
    again.close()
    assert run_dir.past().records == [record(step) for step in range(3)]
    for name in ("metrics", "ledger"):
        rows = (run_dir.path / f"{name}.jsonl").read_text().splitlines()
        assert len(rows) == 3


def test_what_a_later_generation_took_back_is_no_history(run_dir: RunDir):
    """Another node wrote that they are done again; where each has its own directory they stay."""
    entry = Desk().entry(4, base=2, version=2)
    assert run_dir.past().before(entry) == [record(0), record(1)]
    late = RunDir(run_dir.path)
    late.step(record(3), generation=4)
    late.close()
    past = run_dir.past()
    assert past.generations == [1, 1, 1, 4]
    assert past.before(entry) == [record(0), record(1), record(3)]


def test_a_loss_that_nobody_has_recovered_from_is_an_open_incident(run_dir: RunDir):
    """The next coordinator closes it."""
    late = RunDir(run_dir.path)
    late.event("rank_lost", {"rank": 1, "evidence": "gone", "last_words": ""}, 9.0)
    late.close()
    (incident,) = run_dir.past().memory.incidents
    assert (incident.ranks, incident.detected_s, incident.step) == ([1], 9.0, 3)
    assert incident.resumed_s is None


def test_who_is_lost_has_started_no_executor_since(run_dir: RunDir):
    """A standby rank too, whose loss is no incident."""
    late = RunDir(run_dir.path)
    for rank in (1, 2):
        lost = {"rank": rank, "evidence": "gone", "last_words": "", "standby": True}
        late.event("rank_lost", lost, 9.0)
    late.event("executor_started", {"rank": 2, "pid": 7}, 9.5)
    late.close()
    memory = run_dir.past().memory
    assert memory.told_lost == {1}
    assert memory.incidents == []


def test_damaged_rows_are_passed_over(run_dir: RunDir):
    """Two rows that ran into each other, or what a machine left that died: others still count."""
    for name in ("metrics", "ledger"):
        path = run_dir.path / f"{name}.jsonl"
        first, second, third = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(first + second[:9] + second + third)
    events = run_dir.path / "events.jsonl"
    events.write_bytes(b"\0\0\0\n" + events.read_bytes())
    past = run_dir.past()
    assert past.records == [record(0), StepRecord.empty(1), record(2)]
    assert past.memory.executors == {1: 6}


def test_a_step_that_is_in_the_ledger_only_does_not_count(run_dir: RunDir):
    """The other row may still have waited for room on the disk."""
    metrics = run_dir.path / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    assert run_dir.past().records == [record(0), record(1)]
    assert len((run_dir.path / "ledger.jsonl").read_bytes().splitlines()) == 2
