"""The rank supervisor: a thin process that owns an executor and outlives it.

It starts the executor, relays its messages, carries its heartbeat, sees its end at once (pidfd),
fences it on order, and on rank 0 also hosts the coordinator. It never imports torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from resihp.config import JobConfig
from resihp.errors import AuthError, CoordinatorLost, WireError
from resihp.monitor.inject import SupervisorFaults
from resihp.monitor.process import Child, is_stopped
from resihp.monitor.rendezvous import Place
from resihp.monitor.run_dir import RunDir
from resihp.wire.address import LOOPBACK
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connect_handshake
from resihp.wire.clock import Clock
from resihp.wire.messages import (
    AskStop,
    Beat,
    ExecutorExited,
    ExecutorStarted,
    Fault,
    Fence,
    Hello,
    Inject,
    Ready,
    Start,
    Stop,
    Welcome,
)
from resihp.wire.timing import Timing

__all__ = ["Supervisor"]

RETRY_S = 0.05
LAST_WORDS_BYTES = 2000


class Supervisor:
    """Runs one rank until the job stops; `run` returns the exit code of this process."""

    def __init__(self, job: JobConfig, rank: int, clock: Clock) -> None:
        self._job = job
        self._rank = rank
        self._clock = clock
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._child: Child | None = None
        self._up: Channel | None = None
        self._down: Channel | None = None
        self._progress = Beat(step=-1, instruction=-1)
        self._stop: Stop | None = None
        self._gave_up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_ready = False
        self._faults = SupervisorFaults(job, self, clock)
        self._dying: asyncio.Task[None] | None = None

    async def run(self, find_place: Callable[[], Awaitable[Place]]) -> int:
        """Serve this rank. CoordinatorLost where the coordinator ends before the job does."""
        connecting = asyncio.create_task(self._connect(find_place))
        await asyncio.wait([connecting, self._gave_up], return_when=asyncio.FIRST_COMPLETED)
        if self._gave_up.done():
            connecting.cancel()
            return self._gave_up.result()
        self._up = connecting.result()
        self._up.send(Hello(pid=os.getpid()))
        welcome = await self._up.receive()
        if not isinstance(welcome, Welcome):
            raise CoordinatorLost("the coordinator left before the start")
        log_path = RunDir(Path(welcome.run_dir)).log_path(self._rank)
        self._down = await self._start_executor(log_path)
        self._down.send(Start(rank=self._rank, job=welcome.job, struck=dict(self._faults.struck)))
        tasks = [
            asyncio.create_task(work)
            for work in (self._relay_up(), self._watch(log_path), self._beat())
        ]
        try:
            await self._relay_down()
        finally:
            await self._end_executor()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._up.drain(self._timing.grace_s)
            self._up.close()
        assert self._stop is not None
        return self._stop.exit_code

    def ask_stop(self, reason: str, exit_code: int) -> None:
        """A signal arrived: ask the coordinator to end the whole job in order."""
        if self._up is not None:
            self._up.send(AskStop(reason=reason, exit_code=exit_code))
        else:
            self.give_up(exit_code)

    def give_up(self, exit_code: int) -> None:
        """End at once where we have not reached the coordinator yet."""
        if self._up is None and not self._gave_up.done():
            self._gave_up.set_result(exit_code)

    def kill_executor(self) -> None:
        """SIGKILL the executor now."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    # --- what injected faults do (`monitor.inject.Body`)

    def signal_executor(self, number: signal.Signals) -> None:
        """See `Body`."""
        if self._child is not None:
            self._child.send(number)

    def send_up(self, fault: Fault) -> None:
        """See `Body`."""
        if self._up is not None:
            self._up.send(fault)

    def send_down(self, order: Inject) -> None:
        """See `Body`."""
        if self._down is not None:
            self._down.send(order)

    def die(self) -> None:
        """See `Body`."""
        self._dying = asyncio.create_task(self._die())

    async def _die(self) -> None:
        if self._up is not None:
            await self._up.drain(self._timing.beat_s)
        os.kill(os.getpid(), signal.SIGKILL)

    async def _connect(self, find_place: Callable[[], Awaitable[Place]]) -> Channel:
        """Connect to the coordinator; retried, since a stale rendezvous file may mislead us."""
        identity = Identity(self._job.job.name, "supervisor", self._rank, 0)
        deadline_s = self._clock.now_s() + self._timing.start_s
        while True:
            place = await find_place()
            try:
                reader, writer = await asyncio.open_connection(LOOPBACK, place.port)
                seals = await connect_handshake(
                    reader, writer, place.secret, identity, timeout_s=self._timing.handshake_s
                )
                return Channel(reader, writer, seals)
            except (OSError, WireError, TimeoutError) as error:
                if self._clock.now_s() > deadline_s:
                    raise AuthError(f"cannot reach this job's coordinator: {error}") from error
                await asyncio.sleep(RETRY_S)

    async def _start_executor(self, log_path: Path) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._child = Child(
                [sys.executable, "-m", "resihp.executor", str(theirs.fileno())],
                env=_executor_env(),
                pass_fds=(theirs.fileno(),),
                output=log,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        assert self._up is not None
        self._up.send(ExecutorStarted(pid=self._child.pid))
        return Channel(reader, writer)

    async def _end_executor(self) -> None:
        if self._child is None:
            return
        if self._stop is not None and self._down is not None and self._is_ready:
            self._down.send(self._stop)
            await self._child.end(self._timing.grace_s)
        else:
            await self._child.end(0)

    # --- the four duties

    async def _relay_down(self) -> None:
        assert self._up is not None
        assert self._down is not None
        while (message := await self._up.receive()) is not None:
            if isinstance(message, Stop):
                self._stop = message
                return
            if isinstance(message, Fence):
                self.kill_executor()
            elif isinstance(message, Inject):
                self._faults.ordered(message)
            else:
                self._down.send(message)
        raise CoordinatorLost("the coordinator is gone")

    async def _relay_up(self) -> None:
        assert self._up is not None
        assert self._down is not None
        try:
            while (message := await self._down.receive()) is not None:
                if isinstance(message, Beat):
                    self._progress = message
                else:
                    self._is_ready = self._is_ready or isinstance(message, Ready)
                    self._up.send(message)
                    if isinstance(message, Fault):
                        self._faults.announced(message)
        except WireError as error:
            print(f"resihp: rank {self._rank}: executor fenced: {error}", file=sys.stderr)
            self.kill_executor()

    async def _watch(self, log_path: Path) -> None:
        assert self._up is not None
        assert self._child is not None
        code = await self._child.wait()
        words = "" if code < 0 else _last_words(log_path)
        self._up.send(ExecutorExited(code=code, last_words=words))

    async def _beat(self) -> None:
        """Liveness to the coordinator; fences an executor that the kernel shows as stopped."""
        up = self._up
        assert up is not None
        assert self._child is not None
        stopped_since_s: float | None = None
        while True:
            self._faults.beat(lambda: up.send(self._progress))
            await asyncio.sleep(self._timing.beat_s)
            if not (self._child.running and is_stopped(self._child.pid)):
                stopped_since_s = None
                continue
            now_s = self._clock.now_s()
            if stopped_since_s is None:
                stopped_since_s = now_s
            elif now_s - stopped_since_s >= self._timing.stopped_s:
                up.send(
                    Fault(
                        kind="stopped",
                        step=self._progress.step,
                        instruction=self._progress.instruction,
                        at_s=min(stopped_since_s, self._faults.stopped_at_s),
                    )
                )
                self.kill_executor()


def _executor_env() -> dict[str, str]:
    """The executor's environment: one compute thread, loopback for gloo, unless the user says."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _last_words(log_path: Path) -> str:
    """The end of an executor's log, which holds its exception."""
    with log_path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - LAST_WORDS_BYTES))
        return log.read().decode("utf-8", errors="replace")
