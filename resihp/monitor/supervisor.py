"""The rank supervisor: a thin process that owns an executor and outlives it.

It starts the executor, relays its messages, carries its heartbeat, sees its end at once (pidfd),
and fences it on order. Its node's monitor may die: the executor runs on, and what the executor
said last is said again to the next monitor and the next coordinator. It never imports torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from resihp.config import JobConfig
from resihp.errors import AuthError, CoordinatorLost, WireError
from resihp.monitor.executor_process import ExecutorProcess
from resihp.monitor.inject import SupervisorFaults, die
from resihp.monitor.looks import next_look
from resihp.monitor.rendezvous import Place
from resihp.monitor.replay import Replay
from resihp.monitor.run_dir import RunDir
from resihp.wire.address import LOOPBACK
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connect_handshake
from resihp.wire.clock import Clock
from resihp.wire.gate import notice_silence
from resihp.wire.messages import (
    FATAL,
    AskStop,
    Beat,
    Fault,
    Fence,
    Hello,
    Inject,
    Message,
    Ready,
    Resend,
    Resent,
    Respawn,
    Start,
    Stop,
    Welcome,
    decode,
    encode,
)
from resihp.wire.shared_memory import KeptDir, shared_path
from resihp.wire.timing import Timing

__all__ = ["Supervisor"]

RETRY_S = 0.05


class Supervisor:
    """Runs one rank until the job stops; `run` returns the exit code of this process."""

    def __init__(
        self, job: JobConfig, rank: int, clock: Clock, *, was_restarted: bool = False
    ) -> None:
        """`was_restarted`: an earlier supervisor of this rank died; wait to be told to begin."""
        self._job = job
        self._rank = rank
        self._clock = clock
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._waits = was_restarted
        self._host = LOOPBACK
        self._executor: ExecutorProcess | None = None
        self._welcome: Welcome | None = None
        self._memory: KeptDir | None = None
        """Where our executor has its snapshots."""
        self._replay = Replay()
        self._up: Channel | None = None
        self._stop: Stop | None = None
        self._gave_up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._beat_s = clock.now_s()
        """When the last beat was sent."""
        self._faults = SupervisorFaults(job, self, clock)
        self._dying: asyncio.Task[None] | None = None

    async def run(self, find_place: Callable[[], Awaitable[Place]]) -> int:
        """Serve this rank. CoordinatorLost where no monitor is reached for too long."""
        serving = asyncio.create_task(self._serve(find_place))
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait(
                [serving, looking, self._gave_up], return_when=asyncio.FIRST_COMPLETED
            )
            if self._gave_up.done():
                return self._gave_up.result()
            if looking.done():
                looking.result()
            return await serving
        finally:
            for task in (serving, looking):
                task.cancel()
            await asyncio.gather(serving, looking, return_exceptions=True)

    def ask_stop(self, reason: str, exit_code: int) -> None:
        """A signal arrived: ask for the end of the whole job, in order."""
        if self._up is not None:
            self._up.send(AskStop(reason=reason, exit_code=exit_code))
        elif not self._gave_up.done():
            self._gave_up.set_result(exit_code)

    def kill_executor(self, reason: str, pid: int = 0) -> None:
        """SIGKILL the executor now; with `pid` only if it is that one."""
        if self._executor is not None and pid in (0, self._executor.pid):
            self._executor.kill(reason)

    async def _serve(self, find_place: Callable[[], Awaitable[Place]]) -> int:
        try:
            while self._stop is None:
                self._up = channel = await self._connect(find_place)
                try:
                    await self._obey(channel)
                except WireError:
                    pass  # a monitor that cannot be trusted is as good as none
                finally:
                    if self._stop is None:
                        self._up = None
                        channel.close()
            return self._stop.exit_code
        finally:
            if self._executor is not None:
                await self._executor.end(self._stop)
            if self._memory is not None:
                self._memory.leave()
            if self._up is not None:
                await self._up.drain(self._timing.grace_s)
                self._up.close()

    # --- what injected faults do (`monitor.inject.Body`)

    def signal_executor(self, number: signal.Signals) -> None:
        """See `Body`."""
        if self._executor is not None:
            self._executor.signal(number)

    def send_up(self, fault: Fault) -> None:
        """See `Body`."""
        if fault.kind in FATAL and self._executor is not None:
            self._executor.hit(fault.at_s)
        self._say(fault)

    def send_down(self, order: Inject) -> None:
        """See `Body`."""
        if self._executor is not None:
            self._executor.send_payload(encode(order))

    def die(self) -> None:
        """See `Body`."""
        self._dying = asyncio.create_task(die(self._told()))

    async def _told(self) -> None:
        """What was said to the monitor has left."""
        if self._up is not None:
            await self._up.drain(self._timing.beat_s)

    async def _connect(self, find_place: Callable[[], Awaitable[Place]]) -> Channel:
        """Connect to the monitor; retried, since it may restart, or a stale file mislead us."""
        identity = Identity(self._job.job.name, "supervisor", self._rank, 0)
        bound_s = self._timing.start_s if self._welcome is None else self._timing.orphan_s
        deadline_s = self._clock.now_s() + bound_s
        while True:
            place = await find_place()
            try:
                return await self._dial(place, identity)
            except (OSError, WireError, TimeoutError) as error:
                if self._clock.now_s() > deadline_s:
                    why = str(error) or type(error).__name__
                    if self._welcome is None:
                        raise AuthError(f"cannot reach this node's monitor: {why}") from error
                    raise CoordinatorLost(
                        f"no monitor of this node for {bound_s:.0f} s ({why})"
                    ) from error
                await asyncio.sleep(RETRY_S)

    async def _dial(self, place: Place, identity: Identity) -> Channel:
        reader, writer = await asyncio.open_connection(place.host, place.port)
        try:
            seals = await connect_handshake(
                reader, writer, place.secret, identity, timeout_s=self._timing.handshake_s
            )
        except BaseException:
            writer.close()
            raise
        notice_silence(writer.get_extra_info("socket"), self._timing.handshake_s)
        self._host = place.host
        channel = Channel(reader, writer, seals)
        channel.send(Hello(pid=os.getpid(), has_executor=self._has_executor))
        return channel

    @property
    def _has_executor(self) -> bool:
        """Whether there is one, or will be without an order."""
        return self._executor is not None or not self._waits

    # --- what it is told

    async def _obey(self, channel: Channel) -> None:
        while (payload := await channel.receive_payload()) is not None:
            match decode(payload):
                case Stop() as stop:
                    self._stop = stop
                    return
                case Welcome() as welcome:
                    await self._welcomed(welcome)
                case Fence() as fence:
                    self.kill_executor(fence.reason, fence.pid)
                case Inject() as order:
                    self._faults.ordered(order)
                case Respawn() as order:
                    if self._executor is None or self._executor.pid == order.after:
                        await self._start_executor()
                case Resend() as again:
                    channel.send(Resent(has_executor=self._has_executor))
                    for message in self._replay.messages(again.from_step):
                        channel.send(message)
                    self._beat()
                case _:
                    if self._executor is not None:
                        self._executor.send_payload(payload)

    async def _welcomed(self, welcome: Welcome) -> None:
        is_first, self._welcome = self._welcome is None, welcome
        if is_first and not self._waits:
            await self._start_executor()

    async def _start_executor(self) -> None:
        assert self._welcome is not None
        if self._executor is not None:
            await self._executor.end(None)
        run_dir = RunDir(Path(self._welcome.run_dir))
        log_path = run_dir.log_path(self._rank)
        self._faults.started()
        if self._memory is None:
            self._memory = KeptDir(shared_path(run_dir.path.name, self._host))
        self._memory.keep()
        self._executor = ExecutorProcess(
            self._rank, log_path, self._timing, self._clock, self._executor_says
        )
        await self._executor.open(
            Start(
                rank=self._rank,
                job=self._welcome.job,
                host=self._host,
                struck=dict(self._faults.struck),
                run=run_dir.path.name,
            )
        )

    # --- what it says

    def _executor_says(self, message: Message) -> None:
        if isinstance(message, Beat):
            self._beat()  # ours goes with it: one wake-up for both, here and at the monitor
            return
        self._say(message)
        if isinstance(message, Ready) and self._memory is not None:
            self._memory.keep()
        if isinstance(message, Fault):
            self._faults.announced(message)

    def _say(self, message: Message) -> None:
        self._replay.keep(message)
        if self._up is not None:
            self._up.send(message)

    async def _look(self) -> None:
        """Fence an executor that the kernel shows as stopped; beat where it does not."""
        while True:
            await next_look(self._timing.beat_s)
            now_s = self._clock.now_s()
            if self._executor is not None:
                self._executor.check_stopped(now_s, self._faults.stopped_at_s)
            if now_s - self._beat_s > self._timing.report_s + self._timing.beat_s / 2:
                self._beat()

    def _beat(self) -> None:
        """Liveness to the monitor, whatever the executor does, and the executor's progress."""
        self._beat_s = self._clock.now_s()
        self._faults.beat(self._send_beat)

    def _send_beat(self) -> None:
        if self._up is not None:
            executor = self._executor
            self._up.send(Beat(step=-1, instruction=-1) if executor is None else executor.progress)
