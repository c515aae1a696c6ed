"""The monitor of a node on its socket: supervisors and operators here, the coordinator there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from resihp.errors import AuthError
from resihp.monitor.inject import die
from resihp.monitor.keeper import Keeper
from resihp.monitor.node.brief import Brief, Note, NoteFile
from resihp.monitor.node.operators import Operators
from resihp.monitor.node.roster import Roster
from resihp.monitor.process import Child, ProcessHandle, is_stopped
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connection_lost
from resihp.wire.clock import Clock
from resihp.wire.gate import Gate, is_worth_a_line
from resihp.wire.messages import AskStop, Beat, Fault, Hello, Message, Stop, Welcome, decode
from resihp.wire.nodes import (
    Drained,
    Ended,
    EvictRank,
    FromRank,
    NodeBeat,
    NodeChannel,
    NodeMessage,
    RankGone,
    RunAt,
    StopAsked,
    ToOperator,
    ToRanks,
    TurnedAway,
)
from resihp.wire.timing import Timing

__all__ = ["NodeServer"]


class NodeServer:
    """Serves one node until the job has ended and every supervisor has left."""

    def __init__(self, brief: Brief, brief_fd: int, note: NoteFile, clock: Clock) -> None:
        self._brief = brief
        self._brief_fd = brief_fd
        self._note_file = note
        self._clock = clock
        self._job = brief.job_config()
        self._timing = Timing.from_detect_within(self._job.job.detect_within_s)
        self._note = note.read()
        was_restarted = self._note.num_starts > 0
        self._update_note(num_starts=self._note.num_starts + 1)
        ranks = brief.ranks(brief.node, self._job.parallel.world)
        self._roster = Roster(ranks, self._timing, clock.now_s(), was_restarted=was_restarted)
        self._ranks = ranks
        self._gate = Gate(brief.secret, self._admit, timeout_s=self._timing.handshake_s)
        self._channels: dict[int, Channel] = {}
        self._handles: dict[int, ProcessHandle] = {}
        self._evidence: dict[int, str] = {}
        """Why we are about to close the connection of a rank."""
        self._leader: NodeChannel | None = None
        self._operators = Operators(self._timing)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._stop_asked: StopAsked | None = None
        self._ended = asyncio.Event()
        self._left = asyncio.Event()
        if self._note.exit_code is not None:
            self._ended.set()
        self._term = 0
        self._dying: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> int:
        """The exit code of the job."""
        server = await asyncio.start_server(self._connected, sock=listener)
        ticking = asyncio.create_task(self._tick())
        leading = asyncio.create_task(self._lead())
        try:
            await self._ended.wait()
            self._check_left()
            async with asyncio.timeout(2 * self._timing.grace_s):
                await self._left.wait()
                await leading
        except TimeoutError:
            pass  # whoever is left dies with its owner
        finally:
            for task in (ticking, leading):
                task.cancel()
            server.close()
            for writer in self._connections.values():
                writer.close()
            await asyncio.gather(ticking, leading, *self._connections, return_exceptions=True)
        assert self._note.exit_code is not None
        return self._note.exit_code

    def ask_stop(self, reason: str, exit_code: int) -> None:
        """A signal came: the coordinator ends the job, as soon as there is one."""
        self._stop_asked = StopAsked(reason=reason, exit_code=exit_code)
        if self._leader is not None:
            self._leader.send(self._stop_asked)

    def _update_note(self, **changes: object) -> None:
        fields = {name: getattr(self._note, name) for name in Note.__struct_fields__}
        self._note = Note(**{**fields, **changes})  # pyright: ignore[reportArgumentType]
        self._note_file.write(self._note)

    # --- the coordinator

    async def _lead(self) -> None:
        """Keep a coordinator alive, until one has ended the job."""
        keeper = Keeper("the coordinator", self._start_leader, lambda _: True, self._timing)
        try:
            code = await keeper.run()
            if not self._ended.is_set():
                reason = f"the coordinator ended with exit code {code}"
                print(f"resihp: error: {reason}", file=sys.stderr, flush=True)
                self._end(Ended(exit_code=1, reason=reason))
        finally:
            keeper.send(signal.SIGKILL)

    def _start_leader(self) -> Child:
        self._term += 1
        fds = self._brief_fd, self._note_file.fd
        return Child(
            [sys.executable, *self._brief.leader, *map(str, (*fds, self._term))],
            env=os.environ,
            pass_fds=fds,
            block_signals=True,
        )

    async def _serve_leader(self, channel: NodeChannel) -> None:
        if self._leader is not None:
            self._leader.close()
        self._leader = channel
        for rank, evidence in self._roster.gone.items():
            channel.send(RankGone(rank=rank, evidence=evidence))
        if self._stop_asked is not None:
            channel.send(self._stop_asked)
        try:
            while (message := await channel.receive()) is not None:
                self._obey(message)
        finally:
            if self._leader is channel:
                self._leader = None

    def _obey(self, message: NodeMessage) -> None:
        match message:
            case RunAt():
                self._update_note(run_dir=message.run_dir)
                for rank in self._roster.here:
                    self._welcome(rank)
            case ToRanks():
                for rank in message.ranks:
                    if rank in self._channels:
                        self._channels[rank].send_payload(message.payload)
            case EvictRank():
                self._evict(message.rank)
            case ToOperator():
                self._operators.answer(message.number, message.payload)
            case Ended():
                self._end(message)
            case _:
                raise AuthError(f"a coordinator does not send {type(message).__name__}")

    def _tell(self, message: NodeMessage) -> None:
        """To the coordinator, if there is one; the next one asks ranks to say it again."""
        if self._leader is not None:
            self._leader.send(message)

    def _end(self, message: Ended) -> None:
        self._update_note(exit_code=message.exit_code, reason=message.reason)
        for channel in self._channels.values():
            channel.send(self._stop_message())
        self._ended.set()
        self._check_left()

    def _stop_message(self) -> Stop:
        assert self._note.exit_code is not None
        return Stop(reason=self._note.reason, exit_code=self._note.exit_code)

    def _check_left(self) -> None:
        if self._ended.is_set() and not self._channels and not self._left.is_set():
            self._left.set()
            self._tell(Drained())

    # --- connections

    def _admit(self, identity: Identity) -> str | None:
        if identity.job != self._job.job.name:
            return f"this is job {self._job.job.name!r}, not {identity.job!r}"
        match identity.role:
            case "operator" | "coordinator":
                return None
            case "supervisor" if identity.rank in self._channels:
                return f"rank {identity.rank} is here already"
            case "supervisor" if identity.rank in self._ranks:
                return None
            case _:
                return f"no place for {identity.role} {identity.rank}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            identity, seals = await self._gate.prove(reader, writer)
            match identity.role:
                case "operator":
                    await self._operators.serve(Channel(reader, writer, seals), self._leader)
                case "coordinator":
                    await self._serve_leader(NodeChannel(reader, writer, seals))
                case _:
                    await self._serve_rank(identity.rank, Channel(reader, writer, seals))
        except ProcessLookupError:
            pass  # a supervisor that died right after its first message
        except Exception as error:
            if not connection_lost(error):
                raise
            num = self._gate.num_refused
            if is_worth_a_line(num):
                why = str(error) or type(error).__name__
                self._tell(TurnedAway(why=why, refused_so_far=num))
        finally:
            del self._connections[task]
            writer.close()

    # --- supervisors

    async def _serve_rank(self, rank: int, channel: Channel) -> None:
        self._channels[rank] = channel
        self._roster.connected(rank, self._clock.now_s())
        self._welcome(rank)
        try:
            while (payload := await channel.receive_payload()) is not None:
                self._hear(rank, decode(payload), payload)
        finally:
            del self._channels[rank]
            evidence = self._evidence.pop(rank, "its supervisor is gone")
            self._roster.disconnected(rank, evidence)
            self._tell(RankGone(rank=rank, evidence=evidence))
            if rank in self._handles:
                self._handles.pop(rank).close()
            self._check_left()

    def _welcome(self, rank: int) -> None:
        """Once the run's directory is known; a supervisor needs no second one."""
        channel = self._channels[rank]
        if self._note.run_dir is not None:
            channel.send(Welcome(run_dir=self._note.run_dir, job=self._brief.job))
        if self._note.exit_code is not None:
            channel.send(self._stop_message())

    def _hear(self, rank: int, message: Message, payload: bytes) -> None:
        now_s = self._clock.now_s()
        if isinstance(message, Beat):
            self._roster.heard(rank, now_s, message)
            return
        self._roster.heard(rank, now_s)
        if isinstance(message, AskStop):
            self.ask_stop(message.reason, message.exit_code)
            return
        if isinstance(message, Hello) and rank not in self._handles:
            self._handles[rank] = ProcessHandle(message.pid)
        self._tell(FromRank(rank=rank, payload=payload))
        if isinstance(message, Fault) and message.kind == "kill_monitor":
            self._dying = asyncio.create_task(die(self._told()))

    async def _told(self) -> None:
        """What was said to the coordinator has left."""
        if self._leader is not None:
            await self._leader.drain(self._timing.beat_s)

    def _evict(self, rank: int, evidence: str = "its supervisor was evicted") -> None:
        """Kill a supervisor, and take it for gone even where it cannot be killed."""
        if rank in self._channels:
            self._evidence[rank] = evidence
            if rank in self._handles:
                self._handles[rank].send(signal.SIGKILL)
            self._channels[rank].close()

    async def _tick(self) -> None:
        """Once per beat: who is silent, who is missed, and the beat of this node."""
        while True:
            await asyncio.sleep(self._timing.beat_s)
            now_s = self._clock.now_s()
            stopped = [rank for rank, handle in self._handles.items() if is_stopped(handle.pid)]
            for rank, evidence in self._roster.to_kill(stopped, now_s).items():
                self._evict(rank, evidence)
            for rank in self._roster.missed(now_s):
                self._tell(RankGone(rank=rank, evidence=self._roster.gone[rank]))
            self._tell(NodeBeat(beats=self._roster.take_beats()))
