"""Children that die with their parent, and signals that reach the right process: for real."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resihp.monitor.process import Child, ProcessHandle, is_stopped

ROOT = Path(__file__).parents[2]
FAR_S = 20.0


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the system's own tools that is gone afterwards."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_gone(pid_fd: int) -> None:
    """Until the process of a pidfd has ended, be it a child of ours or not."""
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    assert poll.poll(FAR_S * 1000), "the process is still there"


def wait_state(pid: int, *, stopped: bool) -> None:
    """Until the kernel shows a signal's effect, which comes a moment after the signal."""
    os.waitid(os.P_PID, pid, os.WSTOPPED if stopped else os.WCONTINUED)


@pytest.mark.asyncio
async def test_a_child_tells_how_it_ended():
    """Its exit code, negative for a signal, as often as asked."""
    child = Child([sys.executable, "-c", "raise SystemExit(7)"], env=os.environ)
    assert await child.wait() == 7
    assert await child.wait() == 7
    assert not child.running
    killed = Child(["sleep", "600"], env=os.environ)
    assert killed.running
    killed.send(signal.SIGKILL)
    assert await killed.wait() == -signal.SIGKILL


@pytest.mark.asyncio
async def test_a_signal_to_a_child_that_is_gone_does_nothing():
    """Also where its number belongs to somebody else by now."""
    child = Child(["true"], env=os.environ)
    assert await child.wait() == 0
    child.send(signal.SIGKILL)


@pytest.mark.asyncio
async def test_the_end_of_a_child_comes_by_itself_or_by_force():
    """Within the grace it may end as it likes; afterwards it is killed."""
    quick = Child(["true"], env=os.environ)
    assert await quick.end(FAR_S) == 0
    slow = Child(["sleep", "600"], env=os.environ)
    assert await slow.end(0) == -signal.SIGKILL
    assert await slow.end(0) == -signal.SIGKILL


@pytest.mark.asyncio
async def test_a_child_reads_nothing_and_writes_where_it_is_told(tmp_path: Path):
    """Both of its outputs into one file; its input is empty."""
    with (tmp_path / "log").open("wb") as log:
        code = "import sys; print(sys.stdin.read()); print('e', file=sys.stderr)"
        child = Child([sys.executable, "-c", code], env=os.environ, output=log)
        assert await child.wait() == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["e"]


@pytest.mark.asyncio
async def test_a_child_leaves_no_descriptor_behind():
    """A job that loses many executors must not run out of them."""
    await Child(["true"], env=os.environ).wait()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await Child(["true"], env=os.environ).wait()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_dies_with_its_parent():
    """SIGKILL of a supervisor leaves no executor: the kernel sees to it, whatever we do."""
    code = (
        "import asyncio, os, sys\n"
        "from resihp.monitor.process import Child\n"
        "async def run():\n"
        "    child = Child(['sleep', '600'], env=os.environ)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    with parent.stdout:
        grandchild = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert not select.select([grandchild], [], [], 0)[0]
        parent.kill()
        parent.wait()
        wait_gone(grandchild)
    finally:
        os.close(grandchild)


def test_a_stopped_process_is_seen_and_a_running_one_is_not():
    """From its state in the kernel, which needs no answer of the process."""
    with sleeper() as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_state(process.pid, stopped=True)
        assert is_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        wait_state(process.pid, stopped=False)
        assert not is_stopped(process.pid)
    assert not is_stopped(process.pid), "a process that is gone is not stopped"


def test_a_name_with_brackets_does_not_confuse_the_state():
    """The kernel prints the name of the program before its state, unescaped."""
    code = (
        "import ctypes, time\n"
        "ctypes.CDLL(None).prctl(15, b'a) T (b', 0, 0, 0)\n"  # PR_SET_NAME
        "print(flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    try:
        assert "(a) T (b)" in Path(f"/proc/{process.pid}/stat").read_text()
        assert not is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.asyncio
async def test_a_handle_reaches_the_process_and_sees_its_end():
    """A process that need not be our child."""
    with sleeper() as process:
        handle = ProcessHandle(process.pid)
        gone = asyncio.Event()
        handle.when_gone(gone.set)
        assert handle.send(signal.SIGKILL)
        async with asyncio.timeout(FAR_S):
            await gone.wait()
        process.wait()
        assert not handle.send(signal.SIGTERM), "its number may be somebody else's now"
        handle.close()


@pytest.mark.asyncio
async def test_a_closed_handle_calls_nobody():
    """Whoever forgot a process does not hear of its end."""
    with sleeper() as process:
        handle = ProcessHandle(process.pid)
        calls: list[int] = []
        handle.when_gone(lambda: calls.append(1))
        handle.close()
        process.kill()
        process.wait()
        await asyncio.sleep(0)
        assert not calls


def test_there_is_no_handle_to_a_process_that_never_was():
    """The caller hears of it at once."""
    with sleeper() as process:
        pass
    with pytest.raises(ProcessLookupError):
        ProcessHandle(process.pid)
