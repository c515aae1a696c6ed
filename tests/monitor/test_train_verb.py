"""`resihp train` on job files that are for other launchers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resihp.cli import main
from resihp.config import load
from resihp.errors import ConfigError
from resihp.monitor.preflight import check_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"


def job_file(folder: Path, more: str) -> Path:
    """The example with its runs in `folder`."""
    path = folder / "job.toml"
    runs = f'runs_dir = "{folder / "runs"}"'
    text = re.sub(r"^runs_dir = .*?(?= #|$)", runs, EXAMPLE.read_text(), flags=re.M)
    path.write_text(text + more)
    return path


def test_a_job_of_several_machines_is_not_begun_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It is told which launcher does that, and how to act as several machines."""
    network = '[network]\nnodes = ["10.0.0.1", "10.0.0.2"]\nport = 29700\nsecret_file = "key"\n'
    path = job_file(tmp_path, network)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert "network.nodes names the machines of a job under torchrun" in said
    assert f"torchrun --nnodes=2 --nproc-per-node=4 -m resihp.worker {path}" in said
    assert "resihp train --nodes 2" in said
    assert not (tmp_path / "runs").exists()


def test_an_instruction_beyond_the_first_program_is_refused(tmp_path: Path):
    """Of the first step that is struck: the program is known. Later ones may be longer."""
    fault = "[[inject]]\nrank = 1\nstep = {}\ninstruction = 9999\n"
    first = job_file(tmp_path, fault.format(2))
    with pytest.raises(
        ConfigError, match=r"job.toml:\d+: inject\[1\].instruction = 9999: the "
    ) as raised:
        check_job(load(first), first)
    nearest = int(str(raised.value).rpartition(" ")[2])
    for text in (fault.format(2).replace("9999", str(nearest)), fault.format(59)):
        path = job_file(tmp_path, text)
        check_job(load(path), path)
