"""`resihp save` and `resihp audit` at jobs that train on, and a wish to end that nobody forgets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import DEADLINE_S, Job, Run, running, torchrun_command, train_command

from resihp.checkpoint.versions import list_versions, newest_complete

pytestmark = pytest.mark.timeout(180)

COORDINATOR, MONITOR = "resihp.monitor.leader", "resihp.monitor.node"
PAIR = Job(steps=5000, tp=1, pp=1, dp=2)


def command(run: Run, verb: str) -> list[str]:
    return [sys.executable, "-m", "resihp", verb, str(run.dir)]


def ask(run: Run, verb: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run, verb), capture_output=True, text=True)


def check_saved(run: Run, said: str) -> None:
    """The sentence names a complete version."""
    found = {each.name: each for each in list_versions(run.dir / "checkpoints")}
    named = re.search(r"version (\S+),", said)
    assert named is not None
    saved = found[named[1]]
    assert saved.manifest is not None
    size = f"{saved.manifest.data_bytes / 2**20:.1f} MiB"
    assert said == f"step {saved.version.step}: saved as version {saved.name}, {size}\n"


def test_a_version_is_saved_while_the_job_trains_on(tmp_path: Path, corpus: Path) -> None:
    """Also when a rank, or the coordinator, is killed while it is waited for."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        done = ask(run, "save")
        assert (done.returncode, done.stderr) == (0, "")
        check_saved(run, done.stdout)
        for pid in (run.executor_pid(1), run.pid_of(COORDINATOR)):
            waiting = subprocess.Popen(command(run, "save"), stdout=subprocess.PIPE, text=True)
            os.kill(pid, signal.SIGKILL)
            said, _ = waiting.communicate(timeout=DEADLINE_S)
            assert waiting.returncode == 0
            check_saved(run, said)
        assert len(run.events("saved")) >= 3
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143


def test_replicas_are_found_equal_when_an_operator_asks(tmp_path: Path, corpus: Path) -> None:
    """Of unequal TP degrees after a loss, and the job trains on."""
    job = Job(steps=5000, pp=1, kills=((3, 2),), sections="[rejoin]\nrestarts = 0\n")
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(3)
        done = ask(run, "audit")
        assert (done.returncode, done.stderr) == (0, "")
        said = re.fullmatch(r"step (\d+): all replicas of (\d+) shards are equal\n", done.stdout)
        assert said is not None
        (audit,) = run.events("audit")
        assert (audit["version"], audit["equal"]) == (int(said[1]), True)
        run.read_to_step(audit["version"] + 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143


@pytest.mark.usefixtures("own_models")
def test_replicas_that_differ_are_named_to_who_asked(tmp_path: Path, corpus: Path) -> None:
    """[T14] A bit changed by itself at the seventh micro-batch: 1, and the job ends with 1."""
    job = Job(tp=1, pp=2, dp=2, steps=5000, model='factory = "faulty_models:drifting"')
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(4)
        done = ask(run, "audit")
        assert (done.returncode, done.stderr) == (1, "")
        assert "replicas differ: " in done.stdout
        assert "that of rank 1 differs from that of rank 3" in done.stdout
        assert run.finish() == 1


@pytest.mark.parametrize("victim", [COORDINATOR, MONITOR, "the coordinator that saves"])
def test_a_job_that_is_to_end_ends_whoever_dies_meanwhile(
    victim: str, tmp_path: Path, corpus: Path
) -> None:
    """[T6] [T13] SIGTERM, and its coordinator or monitor is killed at once, or while ranks write:
    the next one saves and ends it."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(5)
        module = victim if victim == MONITOR else COORDINATOR
        pid = run.pid_of(module)
        run.process.send_signal(signal.SIGTERM)
        if victim not in (COORDINATOR, MONITOR):
            deadline_s = time.monotonic() + DEADLINE_S
            while not list((run.dir / "checkpoints").glob("*")) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):  # the job has ended meanwhile
            os.kill(pid, signal.SIGKILL)
        assert run.finish() == 143, run.text
    assert "Traceback" not in run.text
    newest, troubles = newest_complete(run.dir / "checkpoints")
    assert newest is not None
    assert troubles == []
    steps = [row["step"] for row in run.rows("metrics")]
    assert steps == list(range(newest.version.step))
    assert f"newest saved: {newest.name}" in run.text


@pytest.mark.parametrize("launch", ["two nodes", "torchrun"])
def test_a_wish_to_end_that_many_say_is_one_wish(launch: str, tmp_path: Path, corpus: Path) -> None:
    """[T13] SIGTERM to the monitors of two nodes, or to all workers of torchrun: the state is
    saved."""
    job = PAIR.write(tmp_path, corpus)
    is_nodes = launch == "two nodes"
    command = train_command(job, "--nodes", "2") if is_nodes else torchrun_command(job, PAIR.world)
    with running(command, tmp_path) as run:
        run.read_to_step(2)
        run.process.send_signal(signal.SIGTERM)
        code = run.finish()
    assert code == 143 if is_nodes else code
    newest, _ = newest_complete(run.dir / "checkpoints")
    assert newest is not None
    assert newest.version.step == len(run.rows("metrics"))
