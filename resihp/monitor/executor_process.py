"""One executor as a child of its supervisor: started, listened to, watched, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from resihp.errors import WireError
from resihp.monitor.process import Child, is_stopped
from resihp.monitor.rendezvous import HANDED_DOWN
from resihp.wire.channel import Channel
from resihp.wire.clock import Clock
from resihp.wire.console import complain
from resihp.wire.messages import (
    FATAL,
    Beat,
    ExecutorExited,
    ExecutorStarted,
    Fault,
    Message,
    Ready,
    Start,
    Stop,
)
from resihp.wire.timing import Timing

__all__ = ["ExecutorProcess", "last_words"]

LAST_WORDS_BYTES = 2000


class ExecutorProcess:
    """The executor of one rank, from its start to its end; `tell` hears what it says and does."""

    def __init__(
        self,
        rank: int,
        log_path: Path,
        timing: Timing,
        clock: Clock,
        tell: Callable[[Message], None],
    ) -> None:
        self._rank = rank
        self._log_path = log_path
        self._timing = timing
        self._clock = clock
        self._tell = tell
        self._is_ready = False
        self._fenced = ""
        self._hit_s: float | None = None
        self._stopped_since_s: float | None = None
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs, log_path.open("ab") as log:
            self._child = Child(
                [sys.executable, "-m", "resihp.executor", str(theirs.fileno())],
                env=_executor_env(),
                pass_fds=(theirs.fileno(),),
                output=log,
            )
        self.pid = self._child.pid
        self.progress = Beat(step=-1, instruction=-1, pid=self.pid)
        """Its last beat; of one that ended, that there is no executor."""
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, start: Start) -> None:
        """Begin to listen to it, and tell it what it is to run."""
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        self._channel = Channel(reader, writer)
        self._tell(ExecutorStarted(pid=self.pid))
        self._channel.send(start)
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._wait())]

    def send_payload(self, payload: bytes) -> None:
        """A message for it, as it came."""
        if self._channel is not None:
            self._channel.send_payload(payload)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._child.send(number)

    def hit(self, at_s: float) -> None:
        """A fault that it dies of was announced."""
        self._hit_s = at_s

    def kill(self, reason: str) -> None:
        """SIGKILL, now; where it still runs, `reason` is what it dies of."""
        if self._child.running:
            self._fenced = self._fenced or reason
        self._child.send(signal.SIGKILL)

    async def end(self, stop: Stop | None) -> None:
        """Let it end by `stop` where there is one and it can hear it, by force otherwise."""
        if stop is not None and self._channel is not None and self._is_ready:
            self._channel.send(stop)
            await self._child.end(self._timing.grace_s)
        else:
            await self._child.end(0)
        # What it said last and its end are told before we return.
        await asyncio.gather(*self._tasks)
        if self._channel is not None:
            self._channel.close()

    def check_stopped(self, now_s: float, known_since_s: float) -> None:
        """Kill it where the kernel shows it as stopped for too long.

        `known_since_s`: when somebody stopped it on purpose; infinity: nobody did.
        """
        if not (self._child.running and is_stopped(self._child.pid)):
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        elif now_s - self._stopped_since_s >= self._timing.stopped_s:
            step, instruction = self.progress.step, self.progress.instruction
            since_s = min(self._stopped_since_s, known_since_s)
            self._tell(Fault(kind="stopped", step=step, instruction=instruction, at_s=since_s))
            self.hit(since_s)
            self.kill(f"it was stopped for {now_s - self._stopped_since_s:.1f} s")

    async def _listen(self) -> None:
        assert self._channel is not None
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, Beat):
                    if not self._child.running:
                        continue
                    self.progress = message = msgspec.structs.replace(message, pid=self.pid)
                elif isinstance(message, Fault) and message.kind in FATAL:
                    self.hit(message.at_s)
                self._is_ready = self._is_ready or isinstance(message, Ready)
                self._tell(message)
        except WireError as error:
            complain(f"resihp: rank {self._rank}: executor fenced: {error}")
            self.kill(f"what it said cannot be read: {error}")

    async def _wait(self) -> None:
        code = await self._child.wait()
        seen_s = self._clock.now_s()
        self.progress = Beat(step=-1, instruction=-1)
        words = "" if code < 0 else last_words(self._log_path)
        self._tell(
            ExecutorExited(
                code=code,
                last_words=words,
                pid=self.pid,
                fenced=self._fenced,
                hit_s=self._hit_s,
                seen_s=seen_s,
            )
        )


def _executor_env() -> dict[str, str]:
    """The executor's environment: one compute thread, loopback for gloo, unless the user says."""
    env = {name: text for name, text in os.environ.items() if name not in HANDED_DOWN}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["PYTHONUNBUFFERED"] = "1"
    return env


def last_words(log_path: Path) -> str:
    """The end of an executor's log, whole lines, with its exception; or why it cannot be read."""
    try:
        with log_path.open("rb") as log:
            start = max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES - 1)
            log.seek(start)
            words = log.read()
            if start and b"\n" in words[:-1]:
                words = words[words.index(b"\n") + 1 :]
            return words.decode("utf-8", errors="replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
