"""Ranks that hang and live: found by who waits for whom, fenced, and gone on without."""

from __future__ import annotations

import os
from pathlib import Path

import hanging_model
import pytest
from jobs import Job, Run, running, train_command

pytestmark = pytest.mark.timeout(240)
NO_RETURN = "[rejoin]\nrestarts = 0\n"


def quick(path: Path) -> Path:
    """The job file with the shortest bound of a hang: five seconds and three beats."""
    path.write_text(path.read_text().replace("[job]\n", "[job]\ndetect_within_s = 0.4\n"))
    return path


def fenced(run: Run) -> list[tuple[int, str]]:
    return [(row["rank"], row["evidence"]) for row in run.events("rank_lost")]


def test_a_rank_that_holds_its_interpreters_lock_for_ever_is_fenced(
    tmp_path: Path, corpus: Path
) -> None:
    """[T3] Its supervisor beats all the time; half a second of the same is nothing."""
    holds = '[[inject]]\nkind = "hold_gil"\nrank = {}\nstep = {}\nlasts_s = {}\n'
    sections = NO_RETURN + holds.format(2, 3, 0.5) + holds.format(5, 6, 600)
    path = quick(Job(steps=10, sections=sections).write(tmp_path, corpus))
    with running(train_command(path), tmp_path) as run:
        assert run.finish() == 0, run.text
    ((rank, evidence),) = fenced(run)
    assert rank == 5
    assert evidence.startswith("fenced: it does not answer, and ranks 0")
    assert [row["step"] for row in run.rows("metrics")] == list(range(10))


def test_a_rank_that_is_stuck_in_its_computation_is_fenced(tmp_path, corpus, monkeypatch):
    """It answers and says what it does; the other replica waits for its gradients."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(hanging_model.PIPE, str(pipe))
    monkeypatch.setenv(hanging_model.RANK, "1")
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    job = Job(
        steps=4,
        tp=1,
        pp=1,
        dp=2,
        kv_heads=4,
        model='factory = "hanging_model:model"\n',
        schedule="1f1b",
        sections=NO_RETURN,
    )
    with running(train_command(quick(job.write(tmp_path, corpus))), tmp_path) as run:
        assert run.finish() == 0, run.text
    ((rank, evidence),) = fenced(run)
    assert rank == 1
    assert evidence.startswith("fenced: it computes `F 0` for ")
    assert evidence.endswith("rank 0 waits for it")
