"""Several nodes on one machine: any of them may be lost, also that of the coordinator."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from agents import free_port, host_of, network_section, under_agents
from jobs import DEADLINE_S, Job, descendants, running, train_command, wait_gone
from slow_relay import slow_relay

pytestmark = pytest.mark.timeout(180)

STEPS = 40
MANY = 5000
"""Steps; no test waits for the last one."""
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


def test_a_lost_torchrun_agent_is_not_waited_for(tmp_path: Path, corpus: Path) -> None:
    """[T8] Agent and workers of a node are killed: the others finish, and their agents return at
    once, since somebody checks in at torchrun's exit barrier for the one that is gone."""
    network = network_section(tmp_path, [host_of(node) for node in range(3)], free_port())
    sections = f"{network}[rejoin]\nrestarts = 0\n"
    job = replace(TRIO, sections=sections).write(tmp_path, corpus)
    with under_agents([job] * 3, tmp_path) as agents:
        run = agents.run
        run.read_to_step(2)
        agents.lose(1)
        assert run.finish() == 0, run.text
        # torchrun itself would wait for 300 s.
        assert agents.of_node[2].wait(DEADLINE_S) == 0
    assert "1 of 1 failures survived" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(STEPS))


def test_a_node_that_is_started_again_gets_its_place_back(tmp_path: Path, corpus: Path) -> None:
    """[T8] Agent and workers are killed, and the same command is given on the node again: its
    ranks return, the plan grows between two steps, and losses are those of a job without faults,
    bit for bit."""
    faulted, healthy = tmp_path / "faulted", tmp_path / "healthy"
    faulted.mkdir()
    healthy.mkdir()
    soon = "[rejoin]\ngood_iterations = 3\n"
    network = network_section(faulted, [host_of(node) for node in range(3)], free_port())
    job = replace(TRIO, steps=MANY, sections=network + soon).write(faulted, corpus)
    with under_agents([job] * 3, faulted) as agents:
        run = agents.run
        run.read_to_step(3)
        agents.lose(1)
        run.read_until(lambda line: line.startswith("! lost rank 1 "))
        agents.bring_back(1)
        run.read_until(lambda line: line.startswith("+ rank 1 is back: the healthy layout"))
        steps = len(run.rows("metrics"))
        run.read_to_step(steps + 2)
        agents.stop()
    losses = run.losses()
    assert [row["rank"] for row in run.events("rank_lost")] == [1], run.text
    assert [row["ranks"] for row in run.events("rejoined")] == [[1]]
    assert not run.events("fence") + run.events("died_again")
    assert [row["step"] for row in run.rows("ledger")] == list(range(len(losses)))
    alone = replace(TRIO, steps=MANY, sections=soon).write(healthy, corpus)
    with running(train_command(alone), healthy) as without:
        without.read_to_step(len(losses))
        without.process.send_signal(signal.SIGTERM)
        assert without.finish() == 128 + signal.SIGTERM, without.text
    assert len(losses) > steps
    assert losses == without.losses()[: len(losses)]


def test_a_control_connection_that_is_slow_and_breaks_costs_nobody(
    tmp_path: Path, corpus: Path
) -> None:
    """[T9] All that coordinator and the other node's monitor say is late by 20 ms, and their
    connection is dropped again and again: nobody is lost, and nobody else leads."""
    port = free_port()
    relay_host, hosts = "127.0.0.12", [host_of(node) for node in range(2)]
    network = network_section(tmp_path, hosts, port)
    rejoin = "[rejoin]\nrestarts = 0\n"
    steps = 200
    pair = Job(steps=steps, tp=1, pp=1, dp=2, sections=network + rejoin)
    job = pair.write(tmp_path, corpus)
    through_relay = tmp_path / "through_relay.toml"
    through_relay.write_text(job.read_text().replace(hosts[1], relay_host))
    with (
        slow_relay(relay_host, port, hosts[1], delay_s=0.02) as relay,
        under_agents([through_relay, job], tmp_path) as agents,
    ):
        run = agents.run
        for step in range(10, 130, 20):
            run.read_to_step(step)
            assert relay.drop() > 0
        assert run.finish() == 0, run.text
        assert agents.of_node[1].wait(DEADLINE_S) == 0
    assert "0 of 0 failures survived, 1 plan used" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(steps))
    assert not run.events("rank_lost") + run.events("evict") + run.events("fence")
    assert len(run.events("leads")) == 1


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


@pytest.mark.parametrize(
    ("num_nodes", "dp", "nearest"), [(2, 3, "1 or 3"), (3, 4, "2 or 4"), (9, 3, "3")]
)
def test_ranks_that_do_not_divide_into_nodes_are_refused(
    num_nodes: int, dp: int, nearest: str, tmp_path: Path, corpus: Path
) -> None:
    """One sentence with the nearest numbers that do, and no process."""
    job = replace(TRIO, dp=dp).write(tmp_path, corpus)
    command = train_command(job, "--nodes", str(num_nodes))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"resihp: error: --nodes {num_nodes}: {dp} ranks do not divide into as many; "
        f"nearest valid: {nearest}\n"
    )
    assert not (tmp_path / "runs").exists()
