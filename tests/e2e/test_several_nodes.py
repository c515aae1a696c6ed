"""Several nodes on one machine: any of them may be lost, also that of the coordinator."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import (
    DEADLINE_S,
    TAG,
    Job,
    Run,
    descendants,
    remove_memory,
    running,
    tagged,
    train_command,
    wait_gone,
)

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
        run.kill_node(pid)
        assert not wait_gone(family)
        assert run.finish() == 0, run.text
    assert "1 of 1 failures survived" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(STEPS))
    assert [row["rank"] for row in run.events("rank_lost")] == [node]
    leaders = [event["node"] for event in run.events("leads")]
    assert leaders[-1] != node


def agent(node: int, job: Path, folder: Path, store_port: int) -> subprocess.Popen[str]:
    """A static torchrun agent with one worker, as on a machine of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"]
    command += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={store_port}"]
    return subprocess.Popen(
        [*command, "--max-restarts=0", "-m", "resihp.worker", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, TAG: str(folder)},
        start_new_session=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_lost_torchrun_agent_is_not_waited_for(tmp_path: Path, corpus: Path) -> None:
    """[T8] Agent and workers of a node are killed: the others finish, and their agents return at
    once, since somebody checks in at torchrun's exit barrier for the one that is gone."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    network = (
        f'[network]\nnodes = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]\nport = {free_port()}\n'
        f'secret_file = "{secret}"\n[rejoin]\nrestarts = 0\n'
    )
    job = replace(TRIO, sections=network).write(tmp_path, corpus)
    store_port = free_port()
    agents = [agent(node, job, tmp_path, store_port) for node in range(3)]
    first = Run(agents[0], tmp_path / "runs")
    try:
        first.read_to_step(2)
        family = descendants(agents[1].pid)
        for pid in (agents[1].pid, *family):
            with contextlib.suppress(ProcessLookupError):  # its parent took it along
                os.kill(pid, signal.SIGKILL)
        assert first.finish() == 0, first.text
        # torchrun itself would wait for 300 s.
        assert agents[2].wait(DEADLINE_S) == 0
    finally:
        for pid in tagged(str(tmp_path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in agents:
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
        remove_memory(first.runs_dir)
    assert "1 of 1 failures survived" in first.text
    assert [row["step"] for row in first.rows("ledger")] == list(range(STEPS))


def test_of_two_nodes_the_lowest_is_needed(tmp_path: Path, corpus: Path) -> None:
    """[T8] Half of the nodes without the lowest is no quorum: the job ends, nobody goes on; soon,
    since under `resihp train` no node comes back."""
    pair = Job(
        steps=500, tp=1, pp=1, dp=2, detect_within_s=0.1, sections="[rejoin]\nrestarts = 0\n"
    )
    with running(train_command(pair.write(tmp_path, corpus), "--nodes", "2"), tmp_path) as run:
        run.read_to_step(2)
        family = descendants(run.process.pid)
        run.kill_node(run.node_pid(0))
        assert run.finish() == 1
        assert not wait_gone(family)
    assert "resihp: error: node 1 hears no quorum of the job's nodes" in run.text
    assert "or half with the lowest: see docs/operating.md" in run.text


def test_nodes_that_are_all_killed_end_the_job_with_a_sentence(
    tmp_path: Path, corpus: Path
) -> None:
    """1, for nobody is left to say more."""
    job = Job(steps=500, tp=1, pp=1, dp=2).write(tmp_path, corpus)
    with running(train_command(job, "--nodes", "2"), tmp_path) as run:
        run.read_to_step(1)
        pids = [run.node_pid(node) for node in range(2)]
        family = descendants(run.process.pid)
        for pid in reversed(pids):
            run.kill_node(pid)
        assert run.finish() == 1
        assert not wait_gone(family)
    assert "resihp: error: every node was killed, node 0 by SIGKILL" in run.text


def test_ranks_that_do_not_divide_into_nodes_are_refused(tmp_path: Path, corpus: Path) -> None:
    """One sentence, and no process."""
    command = train_command(TRIO.write(tmp_path, corpus), "--nodes", "2")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("resihp: error: --nodes 2: 3 ranks do not divide into as many")
    assert not (tmp_path / "runs").exists()
