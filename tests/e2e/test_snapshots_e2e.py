"""State that no live rank holds any more comes out of shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import TP_CHANGE_TOLERANCE, Job, complete, memory_of, running, train_command

pytestmark = pytest.mark.timeout(120)


def test_both_holders_of_a_shard_are_killed_and_training_goes_on(tmp_path: Path, corpus: Path):
    """[T14] From a snapshot of one of them: no step and no sample twice, nothing left in shared
    memory, and the losses of a run without faults within the rounding of a smaller TP degree."""
    job = Job(steps=8)
    (tmp_path / "plain").mkdir()
    (tmp_path / "killed").mkdir()
    code, plain = complete(job, tmp_path / "plain", corpus)
    assert code == 0, plain.text
    path = job.write(tmp_path / "killed", corpus)
    with running(train_command(path), tmp_path / "killed") as run:
        run.read_to_step(3)
        for rank in (2, 6):  # the same shard of the last stage in both replicas
            os.kill(run.executor_pid(rank), signal.SIGKILL)
        code = run.finish()
    assert code == 0, run.text
    assert run.rows("ledger") == plain.rows("ledger")
    assert [row["step"] for row in run.rows("metrics")] == list(range(8))
    plans = "".join(each.read_text() for each in sorted((run.dir / "plans").iterdir()))
    assert "restore layers=" in plans
    assert run.losses() == pytest.approx(plain.losses(), rel=TP_CHANGE_TOLERANCE)
    assert memory_of(run.dir.name) == []
    assert memory_of(plain.dir.name) == []


def test_all_executors_are_killed_at_once_and_come_back(tmp_path: Path, corpus: Path):
    """From shared memory, where nothing else is left of the state: the same plan goes on, and
    every loss is bitwise that of a run without faults."""
    job = Job(steps=8)
    for name in ("plain", "killed"):
        (tmp_path / name).mkdir()
    code, plain = complete(job, tmp_path / "plain", corpus)
    assert code == 0, plain.text
    path = job.write(tmp_path / "killed", corpus)
    with running(train_command(path), tmp_path / "killed") as run:
        run.read_to_step(3)
        for pid in [run.executor_pid(rank) for rank in range(job.world)]:
            os.kill(pid, signal.SIGKILL)
        code = run.finish()
    assert code == 0, run.text
    assert run.rows("ledger") == plain.rows("ledger")
    assert run.losses() == plain.losses()
    assert memory_of(run.dir.name) == []


def test_nodes_with_both_holders_of_a_shard_are_lost_and_a_buddy_has_it(
    tmp_path: Path, corpus: Path
):
    """[T8, T14] Their memory is gone with them; a copy is on the node after each. No step and no
    sample twice, the losses within the rounding of a smaller TP degree."""
    job = Job(steps=12, tp=2, pp=1, dp=2, sections="[rejoin]\nrestarts = 0\n")
    for name in ("plain", "killed"):
        (tmp_path / name).mkdir()
    code, plain = complete(job, tmp_path / "plain", corpus)
    assert code == 0, plain.text
    path = job.write(tmp_path / "killed", corpus)
    with running(train_command(path, "--nodes", "4"), tmp_path / "killed") as run:
        run.read_to_step(3)
        # Of one rank each: the second halves of both replicas.
        for pid in [run.node_pid(node) for node in (1, 3)]:
            run.kill_node(pid)
        code = run.finish()
    assert code == 0, run.text
    assert run.rows("ledger") == plain.rows("ledger")
    plans = "".join(each.read_text() for each in sorted((run.dir / "plans").iterdir()))
    assert "restore layers=" in plans
    assert run.losses() == pytest.approx(plain.losses(), rel=TP_CHANGE_TOLERANCE)
