"""Any single process of a job may die or stop: it is replaced, and training goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import Job, Run, complete, descendants, running, train_command

pytestmark = pytest.mark.timeout(180)

STEPS = 400
"""Enough that somebody leads again before the last one."""
PAIR = Job(steps=STEPS, tp=1, pp=1, dp=2)
SLEEP_S = 8.0
"""Longer than `silent_s` and `unheard_s`."""
COORDINATOR, MONITOR = "resihp.monitor.leader", "resihp.monitor.node"


def hurt(run: Run, module: str, number: signal.Signals, at_step: int) -> int:
    """Signal the process that runs `module` once the job is at a step."""
    run.read_to_step(at_step)
    pid = run.pid_of(module)
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("module", [COORDINATOR, MONITOR])
def test_training_goes_on_without_coordinator_or_monitor(
    module: str, number: signal.Signals, tmp_path: Path, corpus: Path
) -> None:
    """[T6] Neither is needed between failures: no step is lost, doubled, or run again."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        hurt(run, module, number, 5)
        assert run.finish() == 0, run.text
    assert f"finished: {STEPS} steps" in run.text
    assert "0 of 0 failures survived, 1 plan used" in run.text
    for name in ("metrics", "ledger"):
        assert [row["step"] for row in run.rows(name)] == list(range(STEPS))
    assert len(run.events("executor_started")) == 2
    (adopted,) = run.events("adopted")
    assert adopted["generation"] == 1
    terms = [event["term"] for event in run.events("leads")]
    assert terms == sorted(set(terms))
    assert len(terms) == 2


@pytest.mark.parametrize("who", ["executor", "supervisor"])
def test_who_is_killed_before_the_first_plan_is_started_again(
    who: str, tmp_path: Path, corpus: Path
) -> None:
    """[T1] Nothing is lost by then, and the others wait."""
    job = Job(steps=5, tp=1, pp=1, dp=2)
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.wait_for_executors(2)
        pid = run.executor_pid(1) if who == "executor" else run.supervisor_pid(1)
        os.kill(pid, signal.SIGKILL)
        assert run.finish() == 0, run.text
    assert "rank 1 was lost before the start" in run.text
    assert "0 of 0 failures survived, 1 plan used" in run.text
    assert [row["rank"] for row in run.events("executor_started")].count(1) == 2
    (plan,) = run.events("plan")
    assert plan["generation"] == 1


def test_the_only_supervisor_is_waited_for(tmp_path: Path, corpus: Path) -> None:
    """[T6] Nobody is left for a moment; the snapshot in shared memory is."""
    job = Job(steps=40, tp=1, pp=1, dp=1, sections="[state]\nsnapshot_every = 1\n")
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(5)
        os.kill(run.supervisor_pid(0), signal.SIGKILL)
        assert run.finish() == 0, run.text
    assert "1 of 1 failures survived" in run.text
    (waited,) = run.events("waits_for_restarts")
    assert waited["ranks"] == [0]
    assert [row["step"] for row in run.rows("ledger")] == list(range(40))


def test_a_machine_that_slept_goes_on_as_if_nothing_had_been(tmp_path: Path, corpus: Path) -> None:
    """All processes are stopped for longer than any of them may be silent: none blames another."""
    job = Job(steps=60, tp=1, pp=1, dp=2)
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(5)
        pids = [run.process.pid, *sorted(descendants(run.process.pid))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SLEEP_S)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert run.finish() == 0, run.text
    assert "0 of 0 failures survived, 1 plan used" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(60))
    assert len(run.events("executor_started")) == 2
    assert len(run.events("leads")) == 1
    assert max(event["slept_s"] for event in run.events("stood_still")) > 0.9 * SLEEP_S


@pytest.mark.parametrize("kind", ["hang_coordinator", "hang_monitor"])
def test_one_that_hangs_is_replaced_and_the_next_loss_survived(
    kind: str, tmp_path: Path, corpus: Path
) -> None:
    """[T6] Its loop stands still, which no process state shows; a rank is killed meanwhile."""
    fault = f'[[inject]]\nkind = "{kind}"\nrank = 0\nstep = 5\n'
    rejoin = "[rejoin]\nrestarts = 0\n"
    job = Job(steps=20, tp=1, pp=1, dp=2, kills=((1, 8),), sections=rejoin + fault)
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    assert "1 of 1 failures survived" in run.text
    assert "hung for" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(20))
    assert [row["rank"] for row in run.events("rank_lost")] == [1]
    assert len(run.events("leads")) == 2


def test_a_new_coordinator_carries_a_job_over_the_next_loss(tmp_path: Path, corpus: Path) -> None:
    """[T6] Killed again and again, and a rank lost under the last one: all is as without."""
    job = Job(steps=60, tp=1, pp=1, dp=2, kills=((1, 40),), sections="[rejoin]\nrestarts = 0\n")
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        for step in (5, 15, 25):
            hurt(run, COORDINATOR, signal.SIGKILL, step)
        assert run.finish() == 0, run.text
    assert "1 of 1 failures survived, 2 plans used" in run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(60))
    assert [row["rank"] for row in run.events("rank_lost")] == [1]


def test_a_supervisor_and_the_monitor_that_die_together_cost_one_executor(
    tmp_path: Path, corpus: Path
) -> None:
    """[T6] [T7] Whoever says again that the rank is to be started finds that it was."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(5)
        for pid in (run.supervisor_pid(1), run.pid_of(MONITOR)):
            os.kill(pid, signal.SIGKILL)
        assert run.finish() == 0, run.text
    assert [row["step"] for row in run.rows("ledger")] == list(range(STEPS))
    assert [row["rank"] for row in run.events("rank_lost")] == [1]
    assert run.events("died_again") == []
    started = [row["rank"] for row in run.events("executor_started")]
    assert sorted(started) == [0, 1, 1]
