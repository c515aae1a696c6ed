"""Child processes whose life is tied to ours (Linux): death signal, pidfd, process state.

A process is only ever signalled through its pidfd, so a reused number can never be hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

__all__ = ["ENDINGS", "Child", "ProcessHandle", "Stat", "die_with_parent", "is_stopped", "stat_of"]

ENDINGS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a job to end in order."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies (also if it just did)."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def _prepare_child(parent_pid: int, *, block_signals: bool) -> None:
    """Runs in the child between fork and exec."""
    die_with_parent(parent_pid)
    signal.pthread_sigmask(signal.SIG_BLOCK if block_signals else signal.SIG_UNBLOCK, ENDINGS)
    # Whoever writes to a terminal from its background is stopped otherwise, where `tostop` is set.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


_STAT_BYTES = 4096
"""More than the kernel has to say."""


class Stat(NamedTuple):
    """What the kernel says of a process."""

    state: str
    """One letter."""
    parent: int
    cpu_ticks: int
    """Processor time that it used, in ticks of the kernel."""


def stat_of(pid: int) -> Stat:
    """Of a process that was not reaped yet; OSError where it was."""
    # Several times a second for each executor, so not by way of a text file object.
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.read(file, _STAT_BYTES)
    finally:
        os.close(file)
    fields = stat.rpartition(b")")[2].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[11]) + int(fields[12]))


def is_stopped(pid: int) -> bool:
    """Whether the kernel shows the process as stopped (SIGSTOP) or being traced."""
    try:
        return stat_of(pid).state in ("T", "t")
    except OSError:
        return False  # gone: its end is reported by its pidfd


class ProcessHandle:
    """A process by pidfd: signals reach this process or none."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False where the process is gone."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once on the running loop when the process ends."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(self._fd)
            callback()

        loop.add_reader(self._fd, readable)

    def close(self) -> None:
        """Forget the process."""
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


class Child:
    """A child process that dies with us; its end is an awaitable."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        output: IO[bytes] | None = None,
        own_group: bool = False,
        block_signals: bool = False,
    ) -> None:
        """`block_signals`: SIGINT and SIGTERM wait until the child unblocks them.

        `own_group`: what is typed at the terminal signals us, not the child. Its session is ours:
        the kernel's scheduler may give each session a share of its own, and eight executors on two
        cores are 8 % slower for it.
        """
        parent_pid = os.getpid()
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            process_group=0 if own_group else None,
            preexec_fn=lambda: _prepare_child(parent_pid, block_signals=block_signals),
        )
        self.pid = self._process.pid
        self._handle = ProcessHandle(self.pid)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle.when_gone(self._reap)

    def _reap(self) -> None:
        code = self._process.wait()
        self._handle.close()
        if not self._code.done():
            self._code.set_result(code)

    def send(self, number: signal.Signals) -> None:
        """Signal the child; nothing happens where it is gone."""
        if self.running:
            self._handle.send(number)

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet."""
        return not self._code.done()

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return await asyncio.shield(self._code)

    async def end(self, grace_s: float) -> int:
        """Wait `grace_s` for the child to end by itself, then SIGKILL it."""
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.wait()
