"""`resihp checkpoints` lists versions, names what is wrong with them, and says so by its status."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from layouts import job_of
from saved_layouts import logical_state, random_layout, save

from resihp.cli import main
from resihp.config import resolved
from resihp.ir.model import Mesh


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two complete versions and a torn one."""
    for step in (4, 8):
        save(tmp_path, random_layout(random.Random(step)), logical_state(0), step=step)
    torn = save(tmp_path, random_layout(random.Random(1)), logical_state(0), step=12)
    (torn / "complete").unlink()
    return tmp_path


def test_the_newest_comes_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its step, its size and its state; a torn one is no error."""
    assert main(["checkpoints", str(directory), "--verify"]) == 0
    where, torn, newest, oldest = capsys.readouterr().out.splitlines()
    assert where == str(directory)
    assert torn.endswith("not complete")
    assert "complete  step 8" in newest
    assert newest.endswith("all hashes are right")
    assert "step 4" in oldest


def test_damage_that_only_hashing_finds(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[T21] Without --verify the version looks complete; with it, the file and tensor are named."""
    data = next(path for path in directory.glob("*00008*/*.data") if path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[0] ^= 1
    data.write_bytes(raw)
    assert main(["checkpoints", str(directory)]) == 0
    assert "REFUSED" not in capsys.readouterr().out
    assert main(["checkpoints", str(directory), "--verify"]) == 1
    assert f"REFUSED: {data}: " in capsys.readouterr().out


def test_a_run_keeps_its_versions_where_its_job_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a directory in the job file they are in the run's; no run named: the newest."""
    run = tmp_path / "runs" / "small-1"
    run.mkdir(parents=True)
    (run / "job.toml").write_text(resolved(job_of(Mesh(tp=2, pp=1, dp=1))))
    save(run / "checkpoints", random_layout(random.Random(0)), logical_state(0), step=3)
    assert main(["checkpoints", str(run)]) == 0
    assert main(["checkpoints", "--runs-dir", str(run.parent)]) == 0
    first, second = capsys.readouterr().out.split(str(run / "checkpoints"))[1:]
    assert first == second


def test_nothing_there_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No versions: 1. No directory, or no run: 2."""
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert "no versions" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert main(["checkpoints", "--runs-dir", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
