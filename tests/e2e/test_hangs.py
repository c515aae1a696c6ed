"""Ranks that hang and live: found by who waits for whom, fenced, and gone on without."""

from __future__ import annotations

from pathlib import Path

import faulty_models
import pytest
from jobs import Job, Run, complete

pytestmark = pytest.mark.timeout(240)
NO_RETURN = "[rejoin]\nrestarts = 0\n"
QUICK_S = 0.4
"""`detect_within_s` with the shortest bound of a hang: five seconds and three beats."""


def fenced(run: Run) -> list[tuple[int, str]]:
    return [(row["rank"], row["evidence"]) for row in run.events("rank_lost")]


def test_a_rank_that_holds_its_interpreters_lock_for_ever_is_fenced(
    tmp_path: Path, corpus: Path
) -> None:
    """[T3] Its supervisor beats all the time; half a second of the same is nothing."""
    holds = '[[inject]]\nkind = "hold_gil"\nrank = {}\nstep = {}\nlasts_s = {}\n'
    sections = NO_RETURN + holds.format(2, 3, 0.5) + holds.format(5, 6, 600)
    job = Job(steps=10, sections=sections, detect_within_s=QUICK_S)
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    ((rank, evidence),) = fenced(run)
    assert rank == 5
    assert evidence.startswith("fenced: it does not answer, and ranks 0")
    assert [row["step"] for row in run.rows("metrics")] == list(range(10))


@pytest.mark.usefixtures("pipe")
def test_a_rank_that_is_stuck_in_its_computation_is_fenced(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers and says what it does; the other replica waits for its gradients."""
    monkeypatch.setenv(faulty_models.HANGS, "1")
    job = Job(
        steps=4,
        tp=1,
        pp=1,
        dp=2,
        kv_heads=4,
        model='factory = "faulty_models:hanging"\n',
        schedule="1f1b",
        detect_within_s=QUICK_S,
        sections=NO_RETURN,
    )
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    ((rank, evidence),) = fenced(run)
    assert rank == 1
    assert evidence.startswith("fenced: it computes `F 0` for ")
    assert evidence.endswith("rank 0 waits for it")
