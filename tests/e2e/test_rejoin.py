"""A lost rank comes back into a job that runs: its plan grows between two steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import Job, Run, complete, running, train_command

pytestmark = pytest.mark.timeout(240)
SOON = "[rejoin]\ngood_iterations = 3\n"
MANY = 5000
"""Steps; no test waits for the last one."""


def stop(run: Run) -> None:
    """End the job now."""
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.text


def test_losses_are_those_of_a_job_without_faults(tmp_path: Path, corpus: Path) -> None:
    """Bit for bit, with a rank lost, rerouted around, back and lost again; TP does not change."""
    job = Job(steps=MANY, tp=1, sections=SOON)
    faulted, healthy = tmp_path / "faulted", tmp_path / "healthy"
    faulted.mkdir()
    healthy.mkdir()
    path = Job(steps=MANY, tp=1, sections=SOON, kills=((2, 3),)).write(faulted, corpus)
    with running(train_command(path), faulted) as run:
        run.read_until(lambda line: line.startswith("+ rank 2 is back: the healthy layout"))
        steps = len(run.rows("metrics"))
        run.read_to_step(steps + 2)
        stop(run)
        losses = run.losses()
        assert [row["ranks"] for row in run.events("rejoined")] == [[2]], run.text
        assert [row["rank"] for row in run.events("respawn")] == [2]
        assert not run.events("fence") + run.events("died_again"), "one start for one loss"
    (plan,) = sorted((run.dir / "plans").glob("003*.plan"))
    assert "returned 2" in plan.read_text()
    with running(train_command(job.write(healthy, corpus)), healthy) as run:
        run.read_to_step(len(losses))
        stop(run)
        expected = run.losses()
    assert len(losses) > steps
    assert losses == expected[: len(losses)]


def test_where_no_plan_is_left_a_rank_that_is_back_is_taken_in_though_it_is_not_trusted(
    tmp_path: Path, corpus: Path
) -> None:
    """With the state of the rank that is lost, of its snapshot: losses are those of a job without
    faults, bit for bit."""
    late = Job(steps=MANY, tp=1, sections="[rejoin]\ngood_iterations = 100000\n")
    faulted, healthy = tmp_path / "faulted", tmp_path / "healthy"
    faulted.mkdir()
    healthy.mkdir()
    with running(train_command(late.write(faulted, corpus)), faulted) as run:
        run.read_to_step(2)
        for rank in (2, 3):
            os.kill(run.executor_pid(rank), signal.SIGKILL)
            run.read_until(lambda line, rank=rank: line.startswith(f"! lost rank {rank} "))
        while {row["rank"] for row in run.events("rank_returned")} != {2, 3}:
            run.read_until(lambda _: True)
        os.kill(run.executor_pid(1), signal.SIGKILL)
        run.read_until(lambda line: line.startswith("+ rank"))
        steps = len(run.rows("metrics"))
        run.read_to_step(steps + 2)
        stop(run)
        losses = run.losses()
        assert [row["ranks"] for row in run.events("rejoined")] == [[2, 3]], run.text
    with running(train_command(late.write(healthy, corpus)), healthy) as run:
        run.read_to_step(len(losses))
        stop(run)
        expected = run.losses()
    assert len(losses) > steps
    assert losses == expected[: len(losses)]


def test_a_job_without_replicas_goes_on_once_its_rank_is_started_again(
    tmp_path: Path, corpus: Path
) -> None:
    """No plan can do without it: the others wait, it takes its state from its own snapshot, and
    losses are bit for bit those of a job without faults."""
    losses: list[list[float]] = []
    waits: list[int] = []
    for name, kills in (("faulted", ((1, 3),)), ("healthy", ())):
        folder = tmp_path / name
        folder.mkdir()
        code, run = complete(Job(steps=6, tp=1, pp=2, dp=1, kills=kills), folder, corpus)
        assert code == 0, run.text
        losses.append(run.losses())
        waits.append(len(run.events("waits_for_restarts")))
        assert [row["rank"] for row in run.events("respawn")] == [rank for rank, _ in kills]
    assert waits == [1, 0]
    assert losses[0] == losses[1]


def test_an_emulated_rank_comes_back(tmp_path: Path, corpus: Path) -> None:
    """The same control plane; a TP group gets its member back, without a step redone."""
    path = Job(steps=MANY, kills=((5, 3),), tokens=512, sections=SOON).write(tmp_path, corpus)
    text = path.read_text().replace("[batch]", '[device]\nkind = "emulated"\n[batch]')
    path.write_text(text)
    with running(train_command(path), tmp_path) as run:
        run.read_until(lambda line: "+ rank 5 is back: the healthy layout" in line)
        steps = len(run.rows("metrics"))
        run.read_until(lambda line: f"step {steps + 2:4d} " in line)
        stop(run)
    rows = run.rows("metrics")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(run.events("incident")) == 1
    assert [row["rank"] for row in run.events("respawn")] == [5]
    assert len(run.events("running")) == 3
