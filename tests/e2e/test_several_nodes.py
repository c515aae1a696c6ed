"""Several nodes on one machine: any of them may be lost, also that of the coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from jobs import Job, descendants, running, train_command, wait_gone

pytestmark = pytest.mark.timeout(180)

STEPS = 40
# Restarts would bring ranks back; here a loss is to last.
TRIO = Job(steps=STEPS, tp=1, pp=1, dp=3, sections="[rejoin]\nrestarts = 0\n")


@pytest.mark.parametrize("node", [0, 2])
def test_a_lost_node_costs_its_ranks_only(node: int, tmp_path: Path, corpus: Path) -> None:
    """[T6, T8] All its processes die with it; where the coordinator was there, another node's
    monitor starts one, from what a quorum has in its journals."""
    with running(train_command(TRIO.write(tmp_path, corpus), "--nodes", "3"), tmp_path) as run:
        run.read_to_step(3)
        pid = run.node_pid(node)
        family = descendants(pid)
        assert len(family) >= 3, "monitor, supervisor, executor"
        os.kill(pid, signal.SIGKILL)
        assert not wait_gone(family)
        assert run.finish() == 0, run.text
    assert "1 of 1 failures survived" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(STEPS))
    assert [row["rank"] for row in run.events("rank_lost")] == [node]
    leaders = [event["node"] for event in run.events("leads")]
    assert leaders[-1] != node


def test_of_two_nodes_the_lowest_is_needed(tmp_path: Path, corpus: Path) -> None:
    """[T8] Half of the nodes without the lowest is no quorum: the job ends, nobody goes on."""
    pair = Job(steps=500, tp=1, pp=1, dp=2, sections="[rejoin]\nrestarts = 0\n")
    job = pair.write(tmp_path, corpus)
    job.write_text(job.read_text().replace('name = "e2e"', 'name = "e2e"\ndetect_within_s = 0.1'))
    with running(train_command(job, "--nodes", "2"), tmp_path) as run:
        run.read_to_step(2)
        family = descendants(run.process.pid)
        os.kill(run.node_pid(0), signal.SIGKILL)
        assert run.finish() == 1
        assert not wait_gone(family)
    assert "node 1 hears no quorum of the job's nodes" in run.text


def test_ranks_that_do_not_divide_into_nodes_are_refused(tmp_path: Path, corpus: Path) -> None:
    """One sentence, and no process."""
    command = train_command(TRIO.write(tmp_path, corpus), "--nodes", "2")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("resihp: error: --nodes 2: 3 ranks do not divide into as many")
    assert not (tmp_path / "runs").exists()
