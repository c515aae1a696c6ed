"""Saved versions of real jobs: resumed elsewhere, gone back to, refused, saved at the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from jobs import Job, Run, complete, running, train_command

pytestmark = pytest.mark.timeout(240)

STEPS = 12
ALONE = "[state]\nsnapshot_every = 0\n[rejoin]\nrestarts = 0\n"
"""Nothing but live ranks and the disk holds state."""


def sections(folder: Path, *, every: int = 0, resume: bool = False) -> str:
    resumes = "true" if resume else "false"
    return (
        f'[checkpoint]\ndir = "{folder / "versions"}"\nevery = {every}\nresume = {resumes}\n{ALONE}'
    )


def losses(run: Run) -> dict[int, float]:
    """Of all steps; each is there once."""
    rows = run.rows("metrics")
    found = {int(row["step"]): float(row["loss"]) for row in rows}
    assert len(found) == len(rows)
    assert [row["step"] for row in run.rows("ledger")] == sorted(found)
    return found


def finished(job: Job, folder: Path, corpus: Path) -> Run:
    code, run = complete(job, folder, corpus)
    assert code == 0, run.text
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[int, float]:
    """Losses of a job that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = finished(Job(steps=STEPS, tp=1, pp=1, dp=2, sections=ALONE), folder, corpus)
    return losses(run)


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_sigterm_saves_and_another_layout_resumes(
    tmp_path: Path, corpus: Path, undisturbed: dict[int, float]
) -> None:
    """[T13] 143 and a whole version; two stages instead of one go on with the same bits."""
    first = folder_of(tmp_path, "first")
    job = Job(steps=STEPS, tp=1, pp=1, dp=2, sections=sections(tmp_path))
    with running(train_command(job.write(first, corpus)), first) as run:
        run.read_to_step(3)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143
    before = losses(run)
    assert f"newest saved: step-{len(before):08}-" in run.text
    second = folder_of(tmp_path, "second")
    job = Job(steps=STEPS, tp=1, pp=2, dp=2, sections=sections(tmp_path, resume=True))
    resumed = finished(job, second, corpus)
    after = losses(resumed)
    assert min(after) == len(before)
    assert before | after == undisturbed


def test_both_holders_of_a_shard_lost_goes_back_to_the_disk(
    tmp_path: Path, corpus: Path, undisturbed: dict[int, float]
) -> None:
    """[T11] No rank holds stage 1 any more: all begin again from one saved version, bit by bit."""
    kills = ((1, 7), (3, 7))
    job = Job(steps=STEPS, tp=1, pp=2, dp=2, kills=kills, sections=sections(tmp_path, every=2))
    run = finished(job, tmp_path, corpus)
    (back,) = run.events("goes_back")
    assert back["step"] in (2, 4, 6)
    assert "of saved version" in run.text
    assert losses(run) == undisturbed


def test_a_damaged_version_is_refused_by_all_and_the_one_before_is_taken(
    tmp_path: Path, corpus: Path, undisturbed: dict[int, float]
) -> None:
    """[T21] One flipped bit of one shard: whoever reads it, nobody begins with that version."""
    first = folder_of(tmp_path, "first")
    job = Job(steps=STEPS, tp=1, pp=2, dp=2, sections=sections(tmp_path, every=STEPS // 2))
    finished(job, first, corpus)
    newest = sorted((tmp_path / "versions").iterdir())[-1]
    data = next(path for path in newest.glob("part-*.data") if path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    second = folder_of(tmp_path, "second")
    job = Job(steps=STEPS, tp=1, pp=1, dp=2, sections=sections(tmp_path, resume=True))
    run = finished(job, second, corpus)
    assert f"saved version refused: {data}" in run.text
    after = losses(run)
    assert min(after) == STEPS // 2
    assert after == {step: loss for step, loss in undisturbed.items() if step >= STEPS // 2}


def test_nothing_to_resume_is_said_before_anything_starts(tmp_path: Path, corpus: Path) -> None:
    """An empty directory: 2, and the key of the job file."""
    job = Job(steps=2, tp=1, pp=1, dp=2, sections=sections(tmp_path, resume=True))
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        assert run.finish() == 2
    assert "job.toml:" in run.text
    assert "no complete version to resume from" in run.text
    assert "Traceback" not in run.text
