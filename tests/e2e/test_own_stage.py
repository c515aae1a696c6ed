"""The example of a user's own model, with a killed rank and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import running, train_command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_stage" / "job.toml"


def job_of(folder: Path, corpus: Path, *, killed: bool) -> Path:
    text, _, injection = EXAMPLE.read_text().partition("[[inject]]")
    text = text.replace("steps = 20", f'steps = 6\nruns_dir = "{folder / "runs"}"')
    text += f'[data]\nsource = "{corpus}"\n'
    path = folder / "job.toml"
    path.write_text(text + f"[[inject]]{injection}".replace("step = 10", "step = 3") * killed)
    return path


def losses_of(folder: Path, corpus: Path, *, killed: bool) -> list[float]:
    folder.mkdir()
    with running(train_command(job_of(folder, corpus, killed=killed)), folder) as run:
        assert run.finish() == 0, run.text
    assert ("1 of 1 failures survived" in run.text) == killed, run.text
    return run.losses()


@pytest.mark.timeout(120)
def test_a_model_of_plain_modules_survives_a_kill_bitwise(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it knows of ranks, and yet its micro-batches move without changing a bit."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    healthy = losses_of(tmp_path / "healthy", corpus, killed=False)
    assert losses_of(tmp_path / "killed", corpus, killed=True) == healthy
    assert len(healthy) == 6
