"""The run directory: what is written when, so that it can be read without us."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest
from coordinator_cases import job_of, record_of

from resihp.config import JobConfig, load
from resihp.ir.parser import parse
from resihp.monitor.planner import Planner
from resihp.monitor.run_dir import RunDir


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    job = job_of()
    section = msgspec.structs.replace(job.job, runs_dir=str(tmp_path / "some" / "runs"))
    return msgspec.structs.replace(job, job=section)


@pytest.fixture
def run_dir(job: JobConfig):
    made = RunDir.create(job)
    yield made
    made.close()


def rows(run_dir: RunDir, name: str) -> list[dict[str, object]]:
    text = (run_dir.path / f"{name}.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_new_directory_holds_the_whole_job(job: JobConfig, run_dir: RunDir):
    """The job as it was understood, defaults included; it loads again as the same."""
    assert run_dir.path.parent == Path(job.job.runs_dir)
    assert run_dir.path.name.startswith("sim-")
    assert load(run_dir.path / "job.toml") == job
    assert sorted(path.name for path in run_dir.path.iterdir()) == [
        "events.jsonl",
        "job.toml",
        "journal",
        "ledger.jsonl",
        "logs",
        "metrics.jsonl",
        "plans",
        "traces",
    ]


def test_two_runs_of_one_job_do_not_meet(job: JobConfig, run_dir: RunDir):
    """Not even in the same second."""
    assert RunDir.create(job).path != run_dir.path


def test_a_plan_is_kept_with_its_cause_and_can_be_read_again(job: JobConfig, run_dir: RunDir):
    """The cause is one comment, whatever line ends it may hold."""
    text = Planner(job).initial().text
    run_dir.plan(7, text, "lost rank 3:\nsignal 9\r\n\u2028group dp9.pp9")
    kept = (run_dir.path / "plans" / "007.plan").read_text(encoding="utf-8")
    assert kept == f"# generation 7: lost rank 3: signal 9 group dp9.pp9\n{text}"
    assert parse(kept).plan == parse(text).plan


def test_events_are_on_disk_at_once_and_in_order(run_dir: RunDir):
    """Nothing is lost with the process that writes them."""
    run_dir.event("rank_lost", {"rank": 3, "evidence": "gone"}, 1.5)
    run_dir.event("running", {"generation": 2}, 2.5)
    lost, running = rows(run_dir, "events")
    assert (lost["event"], lost["rank"], lost["evidence"]) == ("rank_lost", 3, "gone")
    assert (lost["at_s"], running["at_s"], running["generation"]) == (1.5, 2.5, 2)
    assert isinstance(lost["time"], float)


def test_a_step_is_a_row_of_metrics_and_one_of_the_ledger(run_dir: RunDir):
    """Numbers to plot, and the samples that it used."""
    record = msgspec.structs.replace(record_of(3, 2.5), samples=(8, 1), num_tokens=512)
    run_dir.step(record, 2)
    assert rows(run_dir, "metrics") == [
        {
            "step": 3,
            "loss": 2.5,
            "grad_norm": 1.0,
            "learning_rate": 0.1,
            "skipped": False,
            "tokens_per_s": 1024.0,
            "iteration_s": 0.5,
            "generation": 2,
            "snapshot": False,
        }
    ]
    assert rows(run_dir, "ledger") == [{"step": 3, "samples": [8, 1]}]


def test_a_row_without_finite_numbers_is_still_json(run_dir: RunDir):
    """A skipped step has no loss: null, since JSON has no NaN."""
    run_dir.step(msgspec.structs.replace(record_of(0, float("nan")), skipped=True), 1)
    (row,) = rows(run_dir, "metrics")
    assert (row["loss"], row["skipped"]) == (None, True)


def test_each_rank_has_a_log_of_its_own(run_dir: RunDir):
    """Named after it, in a folder that is there."""
    paths = {run_dir.log_path(rank) for rank in range(3)}
    assert len(paths) == 3
    assert all(path.parent.is_dir() for path in paths)
    assert stat.S_ISDIR(run_dir.path.stat().st_mode)
