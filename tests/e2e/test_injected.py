"""Faults on purpose in real jobs: what is survived, and what is no fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import Job, Run, complete, running, train_command

from resihp.checkpoint.versions import newest_complete

pytestmark = pytest.mark.timeout(120)

JOB = Job(steps=8, tp=1, pp=2, dp=2, sections="[rejoin]\nrestarts = 0\n")


def with_faults(text: str) -> Job:
    return replace(JOB, sections=JOB.sections + text)


def injected(kind: str, rank: int, step: int, more: str = "") -> str:
    return f'[[inject]]\nkind = "{kind}"\nrank = {rank}\nstep = {step}\n{more}\n'


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The job without a fault."""
    code, run = complete(JOB, tmp_path_factory.mktemp("calm"), corpus)
    assert code == 0, run.text
    return run


def test_what_only_takes_time_costs_nobody(calm: Run, tmp_path: Path, corpus: Path):
    """[T3] [T28] Held GIL, a short stop, slow computing, slow links, late and lost beats."""
    job = with_faults(
        injected("hold_gil", 0, 1, "lasts_s = 1.5")
        + injected("stop", 1, 3, "lasts_s = 0.1")
        + injected("slow", 2, 3, "factor = 3.0\nlasts_s = 0.5")
        + injected("slow_link", 3, 4, "delay_s = 0.01\nlasts_s = 0.5")
        + injected("late_beats", 0, 4, "delay_s = 0.3\nlasts_s = 1.0")
        + injected("lost_beats", 1, 5, "share = 0.5\nlasts_s = 1.0")
    )
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    kinds = {"hold_gil", "stop", "slow", "slow_link", "late_beats", "lost_beats"}
    assert {row["fault"] for row in run.events("fault")} == kinds
    assert run.events("rank_lost") == []
    assert run.losses() == calm.losses()


def test_an_executor_that_leaves_and_one_with_an_error_are_survived(
    calm: Run, tmp_path: Path, corpus: Path
):
    """[T1] The error's own words are in the events and in the rank's log."""
    job = with_faults(injected("exit", 0, 2) + injected("exception", 3, 4, "instruction = 5"))
    code, run = complete(job, tmp_path, corpus)
    lost = run.events("rank_lost")
    assert code == 0, run.text
    assert run.losses() == calm.losses()
    assert [row["rank"] for row in lost] == [0, 3]
    assert "exit code 1" in lost[0]["evidence"]
    assert "InjectedError" in lost[1]["last_words"]
    assert "InjectedError" in (run.dir / "logs" / "rank3.log").read_text()


def test_faults_at_random_are_those_of_their_seed(calm: Run, tmp_path: Path, corpus: Path):
    """[T16] Twice the same places, and no other losses."""
    fault = '[[inject]]\nkind = "slow_link"\nrate = 0.5\nseed = 3\nlasts_s = 0.01\n'
    places: list[list[tuple[int, int, int]]] = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, run = complete(with_faults(fault), folder, corpus)
        assert code == 0, run.text
        assert run.losses() == calm.losses()
        faults = run.events("fault")
        places.append(sorted((f["rank"], f["step"], f["instruction"]) for f in faults))
    assert places[0] == places[1]
    assert 1 <= len(places[0]) <= JOB.steps


def inject(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resihp", "inject", str(run.dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_operator_brings_faults_about(tmp_path: Path, corpus: Path):
    """[T32] At once or in the next iteration; what cannot be is refused in one sentence."""
    path = replace(JOB, steps=400).write(tmp_path, corpus)
    with running(train_command(path), tmp_path) as run:
        run.read_to_step(1)
        said = inject(run, "slow", "--rank", "1", "--factor", "1.5", "--lasts", "0.2")
        assert (said.returncode, said.stdout) == (0, "rank 1: slow is on its way\n")
        assert inject(run, "exception", "--rank", "0", "--instruction", "4").returncode == 0
        run.read_until(lambda line: line.startswith("! lost rank 0"))
        for arguments, why in (
            (("kill", "--rank", "0"), "rank 0 is not alive; alive ranks: [1, 2, 3]"),
            (("kill", "--rank", "9"), "rank 9 is not alive"),
            (("slow", "--rank", "1", "--instruction", "9999"), "nearest valid: "),
            (("slow", "--rank", "1", "--moment", "votes"), "nearest valid: vote"),
        ):
            said = inject(run, *arguments)
            assert said.returncode == 2
            assert why in said.stderr
        assert inject(run, "kill", "--rank", "3").returncode == 0
        run.read_until(lambda line: line.startswith("! lost rank 3"))
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM


def test_coordinator_and_monitor_are_hit_whoever_is_lost(tmp_path: Path, corpus: Path):
    """[T6] [T7] [T32] By no rank's name, and the one that answers may be the one that dies."""
    path = replace(JOB, steps=4000).write(tmp_path, corpus)
    with running(train_command(path), tmp_path) as run:
        run.read_to_step(1)
        assert inject(run, "kill").stdout == "rank 0: kill is on its way\n"
        run.read_until(lambda line: line.startswith("! lost rank 0"))
        for num_led, kind in enumerate(("kill_coordinator", "kill_monitor"), 2):
            said = inject(run, kind)
            assert said.returncode == 0, said.stderr
            run.read_until(lambda _, num=num_led: len(run.events("leads")) >= num)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM


def test_a_job_with_a_stuck_collective_still_ends(tmp_path: Path, corpus: Path):
    """[T31] [T13] A rank is stopped, the others wait for it in a collective, then SIGTERM comes."""
    path = replace(JOB, steps=400).write(tmp_path, corpus)
    with running(train_command(path), tmp_path) as run:
        run.read_to_step(1)
        os.kill(run.executor_pid(1), signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM


def test_coordinator_monitor_and_a_supervisor_die_one_after_the_other(
    calm: Run, tmp_path: Path, corpus: Path
):
    """[T6] [T8] Steps go on without the first two; the third costs its rank, whoever leads then."""
    job = with_faults(
        injected("kill_coordinator", 2, 1)
        + injected("kill_monitor", 2, 2)
        + injected("kill_supervisor", 3, 5)
    )
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    assert run.losses() == calm.losses()
    assert len(run.events("leads")) >= 2
    assert {row["rank"] for row in run.events("rank_lost")} == {3}


def test_a_full_disk_and_a_torn_version_cost_a_version_each_and_no_step(
    calm: Run, tmp_path: Path, corpus: Path
):
    """[T20] [T22] Training goes on, the alarm is raised, and what is complete stays so."""
    job = with_faults(
        "[checkpoint]\nevery = 2\nkeep = 4\n"
        + injected("torn_checkpoint", 3, 1)
        + injected("full_disk", 0, 5, "instruction = 0")
    )
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    assert run.losses() == calm.losses()
    assert [row["rank"] for row in run.events("rank_lost")] == [3]
    assert [row["step"] for row in run.events("saved")] == [4]
    assert "no space left" in " ".join(row["why"] for row in run.events("not_saved"))
    newest, troubles = newest_complete(run.dir / "checkpoints")
    assert newest is not None, troubles
    assert newest.manifest is not None
    assert newest.manifest.step == 4
