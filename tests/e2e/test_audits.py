"""Replicas of real jobs are compared; one that changed by itself ends the job by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, complete

pytestmark = pytest.mark.timeout(120)


def test_replicas_of_a_sound_job_are_found_equal(tmp_path: Path, corpus: Path):
    """[T14] Every so many steps, also after a loss left groups of unequal TP degree."""
    sections = "[state]\naudit_every = 2\n[rejoin]\nrestarts = 0\n"
    code, run = complete(Job(steps=8, kills=((5, 3),), sections=sections), tmp_path, corpus)
    assert code == 0, run.text
    audits = run.events("audit")
    assert [row["version"] for row in audits] == [2, 4, 6, 8]
    assert all(row["equal"] for row in audits)


@pytest.mark.usefixtures("own_models")
def test_a_bit_that_changed_by_itself_is_named_and_ends_the_job(tmp_path: Path, corpus: Path):
    """With its tensor and its rank: nobody knows which replica is right."""
    job = Job(
        tp=1,
        pp=2,
        dp=2,
        steps=8,
        model='factory = "faulty_models:drifting"',
        sections="[state]\naudit_every = 1\n",
    )
    code, run = complete(job, tmp_path, corpus)
    assert code == 1, run.text
    (audit,) = [row for row in run.events("audit") if not row["equal"]]
    assert "that of rank 1 differs from that of rank 3" in audit["differing"][0]
    assert f"replicas differ at version {audit['version']}: " in run.text
    assert "Traceback" not in run.text
