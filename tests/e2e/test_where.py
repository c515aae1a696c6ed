"""`resihp where` on a job that hangs: the rank that holds the others up is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hanging_model
import pytest
from jobs import Run, running, train_command

pytestmark = pytest.mark.timeout(120)

JOB = """
[job]
name = "hangs"
detect_within_s = 10.0
steps = 3
runs_dir = "{runs}"
[model]
factory = "hanging_model:model"
hidden_size = 32
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
intermediate_size = 64
vocab_size = 258
[parallel]
pp = 2
[batch]
microbatches = 4
tokens = 64
[data]
source = "{corpus}"
"""


def where(run: Run) -> list[str]:
    command = [sys.executable, "-m", "resihp", "where", str(run.dir)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_rank_that_hangs_is_named_while_it_hangs(tmp_path, corpus, monkeypatch):
    """It computes, all others wait for it; once it goes on, the job ends well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(hanging_model.PIPE, str(pipe))
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(runs=tmp_path / "runs", corpus=corpus))
    with running(train_command(job), tmp_path) as run:
        run.read_to_step(0)
        while True:
            head, *lines = where(run)
            if "waits" in lines[0] and "computes" in lines[1]:
                break
        # Whoever opens the other end lets it go on.
        pipe.write_bytes(b"on")
        assert run.finish() == 0
    assert head == f"{run.dir.name}: generation 1 is running, step 1"
    assert lines[0].startswith(
        "rank 0  dp0.pp0  waits for `recv_grad 0` from dp0.pp1, whose rank 1 is at `F 0`"
    )
    assert lines[1].startswith("rank 1  dp0.pp1  computes `F 0`, for ")
    told = "rank 0 waits in the end for rank 1, which computes `F 0`"
    assert any(line.startswith(told) for line in lines)
