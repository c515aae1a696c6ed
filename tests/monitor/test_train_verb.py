"""`resihp train` on job files that are for other launchers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resihp.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"


def test_a_job_of_several_machines_is_not_begun_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It is told which launcher does that, and how to act as several machines."""
    path = tmp_path / "job.toml"
    network = '[network]\nnodes = ["10.0.0.1", "10.0.0.2"]\nport = 29700\nsecret_file = "key"\n'
    runs = f'runs_dir = "{tmp_path / "runs"}"'
    path.write_text(
        re.sub(r"^runs_dir = .*?(?= #|$)", runs, EXAMPLE.read_text(), flags=re.M) + network
    )
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert "network.nodes names the machines of a job under torchrun" in said
    assert f"torchrun --nnodes=2 --nproc-per-node=4 -m resihp.worker {path}" in said
    assert "resihp train --nodes 2" in said
    assert not (tmp_path / "runs").exists()
