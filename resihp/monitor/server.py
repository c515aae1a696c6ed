"""The coordinator on a socket: connections in, decisions out, the run directory on disk."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from resihp.config import JobConfig, resolved
from resihp.monitor.actions import (
    Action,
    Decide,
    End,
    Evict,
    Log,
    PlanMade,
    Say,
    Seen,
    Send,
    StepCommitted,
)
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.observations import ObservationLog
from resihp.monitor.process import ProcessHandle
from resihp.monitor.rendezvous import Place, write_place
from resihp.monitor.run_dir import RunDir
from resihp.monitor.summary import step_line, summary
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connection_lost
from resihp.wire.clock import Clock
from resihp.wire.gate import Gate, is_worth_a_line
from resihp.wire.messages import (
    AskStop,
    AskWhere,
    At,
    Fence,
    Hello,
    Inject,
    KillRank,
    Positions,
    Refused,
    Reply,
    Stop,
    Welcome,
)
from resihp.wire.timing import Timing

__all__ = ["CoordinatorServer"]

ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes that are no error."""


CENSUS_S = 0.3
"""Beside a beat's period: how long `resihp where` waits for those that do not answer."""


class _Census:
    """Answers of ranks to one question."""

    def __init__(self, ranks: AbstractSet[int]) -> None:
        self.missing = set(ranks)
        self.answers: dict[int, At] = {}
        self.complete = asyncio.Event()
        if not self.missing:
            self.complete.set()

    def add(self, rank: int, answer: At) -> None:
        self.answers[rank] = answer
        self.missing.discard(rank)
        if not self.missing:
            self.complete.set()


class CoordinatorServer:
    """Serves one job until it ends and every supervisor has left (or the grace is over)."""

    def __init__(
        self,
        job: JobConfig,
        coordinator: Coordinator,
        run_dir: RunDir,
        secret: bytes,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._secret = secret
        self._clock = clock
        self._say = say
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._gate = Gate(secret, self._admit, timeout_s=self._timing.handshake_s)
        self._channels: dict[int, Channel] = {}
        self._handles: dict[int, ProcessHandle] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._observations = ObservationLog(run_dir.traces_path)
        self._censuses: list[_Census] = []
        self._ended = asyncio.Event()
        self._all_left = asyncio.Event()
        self.exit_code = 1
        self.reason = ""

    async def serve(self, listener: socket.socket) -> int:
        """Run the job; its exit code."""
        server = await asyncio.start_server(self._connected, sock=listener)
        place = Place(listener.getsockname()[1], self._secret)
        write_place(self._run_dir.control_path, place)
        ticker = asyncio.create_task(self._tick())
        try:
            await self._ended.wait()
            async with asyncio.timeout(2 * self._timing.grace_s):
                await self._all_left.wait()
        except TimeoutError:
            self._say("some supervisors did not leave in time")
        finally:
            ticker.cancel()
            server.close()
            for writer in self._connections.values():
                writer.close()
            await asyncio.gather(*self._connections)
            self._finish()
        return self.exit_code

    def stop(self, reason: str, exit_code: int) -> None:
        """End the job in order, from a signal."""
        self._perform(self._coordinator.stop(reason, exit_code, self._clock.now_s()))

    def _finish(self) -> None:
        headline = self.reason
        if self.exit_code not in ORDERLY:
            print(f"resihp: error: {self.reason}", file=sys.stderr, flush=True)
            headline = "failed"
        self._say(
            summary(
                self._coordinator.records,
                self._coordinator.incidents,
                self._coordinator.num_plans,
                self._run_dir.path,
                headline,
            )
        )
        for handle in self._handles.values():
            handle.close()
        self._run_dir.control_path.unlink()
        self._observations.close()
        if self._observations.trouble:
            self._say(self._observations.trouble)
        self._run_dir.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.beat_s)
            self._perform(self._coordinator.tick(self._clock.now_s()))

    # --- connections

    def _admit(self, identity: Identity) -> str | None:
        if identity.job != self._job.job.name:
            return f"this is job {self._job.job.name!r}, not {identity.job!r}"
        if identity.role == "operator":
            return None
        if identity.role != "supervisor" or identity.rank not in range(self._job.parallel.world):
            return f"no place for {identity.role} {identity.rank}"
        if identity.rank in self._channels:
            return f"rank {identity.rank} is here already"
        return None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            identity, channel = await self._gate.enter(reader, writer)
            if identity.role == "operator":
                await self._serve_operator(channel)
            else:
                await self._serve_rank(identity.rank, channel)
        except ProcessLookupError:
            pass  # a supervisor that died right after its first message
        except Exception as error:
            if not connection_lost(error):
                raise
            self._refused(error)
        finally:
            del self._connections[task]
            writer.close()

    def _refused(self, error: Exception) -> None:
        num = self._gate.num_refused
        if is_worth_a_line(num):
            why = str(error) or type(error).__name__
            row: dict[str, object] = {"why": why, "refused_so_far": num}
            self._run_dir.event("connection_refused", row, self._clock.now_s())

    async def _serve_rank(self, rank: int, channel: Channel) -> None:
        self._channels[rank] = channel
        channel.send(Welcome(run_dir=str(self._run_dir.path), job=resolved(self._job)))
        if self._ended.is_set():
            channel.send(Stop(reason=self.reason, exit_code=self.exit_code))
        try:
            while (message := await channel.receive()) is not None:
                if isinstance(message, Hello):
                    self._handles[rank] = ProcessHandle(message.pid)
                elif isinstance(message, AskStop):
                    self.stop(message.reason, message.exit_code)
                else:
                    if isinstance(message, At):
                        for census in self._censuses:
                            census.add(rank, message)
                    now_s = self._clock.now_s()
                    self._perform(self._coordinator.receive(rank, message, now_s))
        finally:
            del self._channels[rank]
            self._perform(self._coordinator.disconnected(rank, self._clock.now_s()))
            if not self._channels:
                self._all_left.set()

    async def _serve_operator(self, channel: Channel) -> None:
        async with asyncio.timeout(self._timing.handshake_s):
            message = await channel.receive()
        match message:
            case KillRank():
                channel.send(self._kill(message.rank))
            case Inject():
                channel.send(self._inject(message))
            case AskWhere():
                channel.send(await self._positions())
            case _:
                return
        await channel.drain(self._timing.grace_s)

    async def _positions(self) -> Positions:
        """Where the ranks are that answer within a moment."""
        census = _Census(self._coordinator.alive & self._channels.keys())
        self._censuses.append(census)
        try:
            for rank in census.missing:
                self._channels[rank].send(AskWhere())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.beat_s + CENSUS_S):
                    await census.complete.wait()
        finally:
            self._censuses.remove(census)
        return self._coordinator.positions(census.answers, self._clock.now_s())

    def _kill(self, rank: int) -> Reply | Refused:
        refusal = self._unfit(rank)
        if refusal is not None:
            return Refused(text=refusal)
        self._coordinator.hit(rank, self._clock.now_s())
        self._channels[rank].send(Fence(reason="operator"))
        return Reply(text=f"rank {rank}: SIGKILL sent to its executor")

    def _inject(self, order: Inject) -> Reply | Refused:
        refusal = self._unfit(order.rank)
        if refusal is not None:
            return Refused(text=refusal)
        self._run_dir.event(
            "inject", {"rank": order.rank, "fault": order.fault}, self._clock.now_s()
        )
        self._channels[order.rank].send(order)
        return Reply(text=f"rank {order.rank}: {order.fault.get('kind')} is on its way")

    def _unfit(self, rank: int) -> str | None:
        """Why nothing can be done to `rank`; None: it can."""
        alive = sorted(self._coordinator.alive)
        if rank not in alive or rank not in self._channels:
            return f"rank {rank} is not alive; alive ranks: {alive}"
        if self._coordinator.phase is Phase.STARTING:
            return "the job has not begun yet"
        if self._coordinator.phase is Phase.STOPPING:
            return "the job is ending"
        return None

    def _evict(self, rank: int) -> None:
        """Kill a silent supervisor, and take it for gone even where it cannot be killed."""
        if rank in self._handles:
            self._handles[rank].send(signal.SIGKILL)
        if rank in self._channels:
            self._channels[rank].close()

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(rank, message):
                    if rank in self._channels:
                        self._channels[rank].send(message)
                case Decide(entry):
                    now_s = self._clock.now_s()
                    self._perform(self._coordinator.decided(entry.generation, now_s))
                case Log(kind, fields):
                    self._run_dir.event(kind, fields, self._clock.now_s())
                case PlanMade(generation, text, cause):
                    self._run_dir.plan(generation, text, cause)
                    self._run_dir.event(
                        "plan", {"generation": generation, "cause": cause}, self._clock.now_s()
                    )
                case StepCommitted(record, generation):
                    self._run_dir.step(record, generation)
                    self._say(step_line(record, generation))
                case Seen(rank, observed):
                    self._observations.add(rank, observed)
                case Say(line):
                    self._say(line)
                case Evict(rank):
                    self._evict(rank)
                case End(exit_code, reason):
                    self.exit_code, self.reason = exit_code, reason
                    self._ended.set()
                    if not self._channels:
                        self._all_left.set()
