"""How jobs end: signals, kills by hand, losses that nothing can carry, bad launches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job, complete, descendants, running, train_command, wait_gone

from resihp.wire.shared_memory import shared_path

pytestmark = pytest.mark.timeout(120)

PAIR = Job(steps=500, tp=1, pp=1, dp=2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_job_in_order(
    number: signal.Signals, code: int, tmp_path: Path, corpus: Path
) -> None:
    """[T13] Ctrl-C and SIGTERM: summary printed, 128 + signal returned, no process left."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        family = descendants(run.process.pid)
        run.process.send_signal(number)
        assert run.finish() == code
        assert not wait_gone(family, within_s=0.5)
    assert f"stopped by {number.name}" in run.text
    assert "Traceback" not in run.text


def test_a_journal_that_cannot_be_written_ends_the_job_at_the_next_loss(
    tmp_path: Path, corpus: Path
) -> None:
    """Steps need no journal; the plan after a loss does, and one sentence says what and where."""
    job = PAIR.write(tmp_path, corpus)
    with running(train_command(job), tmp_path) as run:
        run.read_to_step(2)
        journal = run.dir / "journal" / "node0"
        journal.with_name("node0.new").mkdir()  # in the way of what would replace it
        os.kill(run.executor_pid(1), signal.SIGKILL)
        assert run.finish() == 1
    assert "Traceback" not in run.text
    (error,) = (line for line in run.text.splitlines() if line.startswith("resihp: error:"))
    assert "is undecided after" in error
    assert f"its journal {journal} cannot be written: Is a directory" in error
    assert run.text.count("resihp: warning: node 0 has no vote") == 1


@pytest.mark.parametrize(
    ("is_owned_by_worker", "is_gone"), [(False, False), (True, False), (False, True)]
)
def test_a_journal_that_is_damaged_or_gone_ends_the_node(
    is_owned_by_worker: bool,
    is_gone: bool,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A monitor that finds it so has forgotten what it promised: one sentence, no other."""
    job = Job(steps=5000, tp=1, pp=1, dp=1).write(tmp_path, corpus)
    command = train_command(job)
    if is_owned_by_worker:  # as under torchrun
        for name, number in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(name, number)
        command = [sys.executable, "-m", "resihp.worker", str(job)]
    with running(command, tmp_path) as run:
        run.read_to_step(2)
        journal = run.dir / "journal" / "node0"
        journal.write_bytes(b"what nobody wrote")
        if is_gone:
            journal.unlink()
        os.kill(run.pid_of("resihp.monitor.node"), signal.SIGKILL)
        assert run.finish() == 1
    assert "Traceback" not in run.text
    errors = [line for line in run.text.splitlines() if line.startswith("resihp: error:")]
    what = "gone" if is_gone else "damaged: its hash is another"
    assert errors == [f"resihp: error: the journal {journal} is {what}"]


@pytest.mark.parametrize(("options", "hosts"), [((), (1,)), (("--nodes", "2"), (1, 2))])
def test_a_second_signal_ends_it_at_once(
    options: tuple[str, ...], hosts: tuple[int, ...], tmp_path: Path, corpus: Path
) -> None:
    """Two times Ctrl-C: 130, the kernel has taken everything with it, and no file is left."""
    command = train_command(PAIR.write(tmp_path, corpus), *options)
    with running(command, tmp_path) as run:
        run.read_to_step(2)
        family = descendants(run.process.pid)
        # Stopped supervisors cannot end in order, so only the second signal can end the job.
        for rank in range(2):
            os.kill(run.supervisor_pid(rank), signal.SIGSTOP)
        snapshots = [shared_path(run.dir.name, f"127.0.0.{host}") for host in hosts]
        assert all(path.exists() for path in snapshots)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130
        assert not [path for path in (*snapshots, run.dir / "control") if path.exists()]
        assert not wait_gone(family)


def test_a_signal_during_the_start_ends_the_job(tmp_path: Path, corpus: Path) -> None:
    """Ctrl-C while the executors still import torch."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_until(lambda line: line.startswith("run directory"))
        family = descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130
        assert not wait_gone(family)


def test_a_dead_launcher_takes_the_job_with_it(tmp_path: Path, corpus: Path) -> None:
    """[T8] SIGKILL of `resihp train` leaves no supervisor and no executor behind."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(1)
        family = descendants(run.process.pid)
        assert len(family) == 6, "monitor, coordinator, two supervisors, two executors"
        run.process.kill()
        assert not wait_gone(family)


def test_kill_by_hand_costs_one_rank_only(tmp_path: Path, corpus: Path) -> None:
    """`resihp kill --rank 1` on a running job: it goes on with the other replica."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        kill = [sys.executable, "-m", "resihp", "kill", "--rank", "1", "--run", str(run.dir)]
        done = subprocess.run(kill, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        run.read_until(lambda line: line.startswith("! lost rank 1"))
        again = subprocess.run(kill, capture_output=True, text=True, check=False)
        assert again.returncode == 2
        assert again.stderr == "resihp: error: rank 1 is not alive; alive ranks: [0]\n"
        run.process.send_signal(signal.SIGINT)
        run.finish()
    assert "1 of 1 failures survived" in run.text


def test_a_stopped_executor_is_fenced(tmp_path: Path, corpus: Path) -> None:
    """[T2] SIGSTOP: a hung rank is killed by its supervisor before the others go on."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        pid = run.executor_pid(1)
        os.kill(pid, signal.SIGSTOP)
        run.read_until(lambda line: line.startswith("! lost rank 1"))
        assert not wait_gone({pid})
        run.process.send_signal(signal.SIGINT)
        run.finish()
    assert "1 of 1 failures survived" in run.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_supervisor_costs_its_rank_only(rank: int, tmp_path: Path, corpus: Path) -> None:
    """The kernel kills the executor with its supervisor, and the others go on."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        executor = run.executor_pid(rank)
        os.kill(run.supervisor_pid(rank), signal.SIGKILL)
        run.read_until(lambda line: line.startswith(f"! lost rank {rank}"))
        assert not wait_gone({executor})
        run.process.send_signal(signal.SIGINT)
        run.finish()
    assert "1 of 1 failures survived" in run.text


def test_a_loss_that_no_plan_can_carry_stops_all_with_one_sentence(
    tmp_path: Path, corpus: Path
) -> None:
    """[T12] Both holders of a shard are gone: exit code 4, the reason, and the newest state."""
    sections = "[rejoin]\nrestarts = 0\n"
    job = Job(steps=6, tp=1, pp=2, dp=1, kills=((1, 2),), sections=sections)
    code, run = complete(job, tmp_path, corpus)
    assert code == 4
    sentences = [line for line in run.output if "no plan can carry the loss of rank 1" in line]
    assert len(sentences) == 1
    assert "layers 2..3" in sentences[0]
    assert "step 2 is not saved" in sentences[0]
    assert sentences[0].startswith("resihp: error: ")
    assert "Traceback" not in run.text


def test_a_broken_job_file_is_one_error_and_no_process(tmp_path: Path, corpus: Path) -> None:
    """Key, value and nearest valid choice; exit code 2; no traceback, no run directory."""
    job = PAIR.write(tmp_path, corpus)
    job.write_text(job.read_text().replace("dp = 2", "dp = 2\npipe = 3"))
    done = subprocess.run(train_command(job), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pipe" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('source = "', 'source = "/no/such', "data.source"),
        ("258", '65536\n[device]\nmemory = "1MiB"', "device.memory"),
        ('runs_dir = "', 'runs_dir = "/proc', "job.runs_dir"),
    ],
)
def test_what_is_bound_to_fail_is_refused_before_a_process_starts(
    old: str, new: str, key: str, tmp_path: Path, corpus: Path
) -> None:
    """No data, no room for the model, nowhere to write: one error that names the key."""
    job = PAIR.write(tmp_path, corpus)
    job.write_text(job.read_text().replace(old, new))
    done = subprocess.run(train_command(job), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    place = rf"({re.escape(str(job))}:\d+: )?"  # a directory is only made by rank 0, without it
    assert re.match(rf"resihp: error: {place}{re.escape(key)} = ", done.stderr)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_kill_before_the_job_runs_is_refused(tmp_path: Path, corpus: Path) -> None:
    """Nobody could take over yet; the job is not harmed."""
    with running(train_command(PAIR.write(tmp_path, corpus)), tmp_path) as run:
        run.read_until(lambda line: line.startswith("run directory"))
        control = run.dir / "control"
        while not control.exists():
            assert run.process.poll() is None
        kill = [sys.executable, "-m", "resihp", "kill", "--rank", "1", "--run", str(run.dir)]
        done = subprocess.run(kill, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "resihp: error: the job has not begun yet\n"
        run.read_to_step(0)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130


def test_the_wrong_number_of_workers_is_refused(tmp_path: Path, corpus: Path) -> None:
    """torchrun with another world than the job needs: the error names the right flag."""
    job = PAIR.write(tmp_path, corpus)
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    command = [sys.executable, "-m", "resihp.worker", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "--nproc-per-node=2" in done.stderr


def test_a_console_that_is_gone_ends_no_job(tmp_path: Path, corpus: Path) -> None:
    """Whoever read the output leaves in the middle: all steps are made, and the job ends with 0."""
    job = Job(steps=60, tp=1, pp=1, dp=2)
    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        run.read_to_step(2)
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(60) == 0
        assert [row["step"] for row in run.rows("metrics")] == list(range(60))
