"""`resihp where` on a job that hangs: the rank that holds the others up is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, running, train_command

pytestmark = pytest.mark.timeout(120)

JOB = Job(
    steps=3,
    tp=1,
    pp=2,
    dp=1,
    kv_heads=4,
    model='factory = "faulty_models:hanging"\n',
    detect_within_s=10.0,
)


def test_the_rank_that_hangs_is_named_while_it_hangs(
    tmp_path: Path, corpus: Path, pipe: Path
) -> None:
    """It computes, all others wait for it; once it goes on, the job ends well."""
    with running(train_command(JOB.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(0)
        while True:
            head, *lines = run.where()
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
