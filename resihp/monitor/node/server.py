"""The monitor of a node on its socket: supervisors and operators here, coordinators there.

Any number of coordinators may ask for this node's promise; only the one that has the newest is
obeyed and told what the ranks say. A monitor that finds itself without a leader starts one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from resihp.errors import AuthError
from resihp.monitor.inject import die, hang
from resihp.monitor.keeper import MAX_QUICK_ENDS, Keeper
from resihp.monitor.looks import next_look
from resihp.monitor.node.brief import Brief, NoteFile
from resihp.monitor.node.election import Election
from resihp.monitor.node.operators import Operators
from resihp.monitor.node.supervisors import Supervisors
from resihp.monitor.process import Child
from resihp.monitor.pulse import Pulse
from resihp.monitor.run_dir import RunDir
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connection_lost
from resihp.wire.clock import Clock
from resihp.wire.console import complain
from resihp.wire.gate import Gate, is_worth_a_line
from resihp.wire.messages import AskStop, Fault, Fence, Message, Stop, Welcome
from resihp.wire.nodes import (
    Drained,
    Ended,
    EvictRank,
    JournalRefused,
    NodeChannel,
    NodeMessage,
    RunAt,
    StopAsked,
    ToOperator,
    ToRanks,
    TurnedAway,
)
from resihp.wire.quorum import Accepted, Lead, Leads, Promise, Propose, Superseded
from resihp.wire.timing import Timing

__all__ = ["DEPOSED", "HOPELESS", "NodeServer"]

DEPOSED = 3
"""Exit code of a coordinator that gave up its lead, or did not get it."""
HOPELESS = 5
"""Of one that found that nobody will ever lead again: too many nodes are gone for good."""
MAX_REASON = 256
"""Characters of why the job is to end: they go into the note."""


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
        self._election = Election(brief, self._timing, clock.now_s())
        self._supervisors = Supervisors(
            brief.ranks(brief.node, self._job.parallel.world),
            self._timing,
            clock,
            was_restarted=was_restarted,
            tell=self._tell,
            on_message=self._heard,
        )
        self._gate = Gate(brief.secret, self._admit, timeout_s=self._timing.handshake_s)
        self._leader: NodeChannel | None = None
        self._turned_away: TurnedAway | None = None
        """The last stranger, until whoever leads is told."""
        self._pulse = Pulse()
        self._coordinator = Keeper(
            "the coordinator",
            self._start_coordinator,
            self._timing,
            pulse=self._pulse,
        )
        self._operators = Operators(self._timing)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._begin_by_s = clock.now_s() + self._timing.start_s
        """When some coordinator must have come, where the run is not ours to begin."""
        self._is_fenced = False
        self._dying: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._left = asyncio.Event()
        if self._note.exit_code is not None:
            self._ended.set()
        run_dir = self._note.run_dir or brief.run_dir
        if run_dir is not None:
            self._run_at(run_dir)

    @property
    def beat_s(self) -> float:
        """Period of whatever is periodic here."""
        return self._timing.beat_s

    async def serve(self, listener: socket.socket) -> int:
        """The exit code of the job."""
        server = await asyncio.start_server(self._connected, sock=listener)
        ticking = asyncio.create_task(self._tick())
        leading = asyncio.create_task(self._lead())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait([ticking, leading, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in (ticking, leading):
                if task.done():
                    task.result()  # it ends by a bug of ours only, or with the job
            async with asyncio.timeout(2 * self._timing.grace_s):
                self._check_left()
                await self._left.wait()
                await leading
        except TimeoutError:
            pass  # whoever is left dies with its owner
        finally:
            self._coordinator.send(signal.SIGKILL)
            self._operators.leave()
            await asyncio.sleep(0)  # what they are told is on its way
            for task in (ticking, leading, ended):
                task.cancel()
            server.close()
            for writer in self._connections.values():
                writer.close()
            await asyncio.gather(
                ticking, leading, ended, *self._connections, return_exceptions=True
            )
        assert self._note.exit_code is not None
        return self._note.exit_code

    def ask_stop(self, reason: str, exit_code: int) -> None:
        """A signal came: the coordinator ends the job, as soon as there is one.

        Each that follows it is told, too, also by a monitor that follows this one.
        """
        stop = self._note.stop
        if stop is None:
            stop = StopAsked(reason=reason[:MAX_REASON], exit_code=exit_code)
            self._update_note(stop=stop)
        self._tell(stop)

    def _update_note(self, **changes: object) -> None:
        """Keep `changes` of the note's fields for the next monitor."""
        self._note = msgspec.structs.replace(self._note, **changes)
        self._note_file.write(self._note)

    # --- our own coordinator

    async def _lead(self) -> None:
        """Start coordinators whenever nobody leads, until the job is over."""
        is_wanted = self._is_wanted()
        while not self._ended.is_set():
            if not is_wanted:
                await next_look(self._timing.beat_s)
                is_wanted = self._is_wanted()
                continue
            code = await self._coordinator.run_one()
            if code == DEPOSED:
                self._coordinator.num_quick, is_wanted = 0, False
                continue
            if code == HOPELESS and not self._ended.is_set():
                self._give_up(self._no_quorum())
                return
            # It led, or was about to, and nobody else knows yet that it is gone.
            is_wanted = True
            num_broken = self._coordinator.num_quick
            if num_broken > MAX_QUICK_ENDS and not self._ended.is_set():
                often = f"{num_broken} times in a row, at last with {code}"
                self._give_up(f"the coordinator ended {often}")
            await self._coordinator.pause()

    def _is_wanted(self) -> bool:
        return self._election.is_open and self._election.watch.wants_leader(self._clock.now_s())

    def _start_coordinator(self) -> Child:
        fds = self._brief_fd, self._note_file.fd, self._pulse.fd
        term = self._election.promised + 1
        return Child(
            [sys.executable, *self._brief.leader, *map(str, (*fds, term))],
            env=os.environ,
            pass_fds=fds,
            block_signals=True,
        )

    # --- whoever leads, or wants to

    async def _serve_candidate(self, channel: NodeChannel) -> None:
        term = 0
        try:
            while (message := await channel.receive()) is not None:
                match message:
                    case RunAt():
                        self._run_at(message.run_dir)
                    case Lead() if self._note.exit_code is not None:
                        code, reason = self._note.exit_code, self._note.reason
                        channel.send(Ended(exit_code=code, reason=reason, was_over=True))
                    case Lead() | Propose():
                        reply = await self._answer(message)
                        channel.send(reply)
                        if isinstance(reply, JournalRefused):
                            continue
                        is_probe = isinstance(reply, Promise) and reply.is_probe
                        if not is_probe and not isinstance(reply, Superseded):
                            term = reply.term
                            self._follow(channel)
                    case Leads():
                        self._election.watch.heard(message, self._election.promised)
                        if self._leader is channel:
                            self._led(channel)
                    case Ended(was_over=True):
                        self._end(message)
                    case _ if self._election.obeys(term):
                        self._obey(message)
                    case _:
                        pass  # somebody else was promised a newer term
        finally:
            if self._leader is channel:
                self._leader = None
                self._election.watch.lost_connection()

    async def _answer(
        self, message: Lead | Propose
    ) -> Promise | Accepted | Superseded | JournalRefused:
        if not self._election.is_open:
            raise AuthError("a coordinator says first where the run is")
        is_news = not self._election.trouble
        try:
            reply = await self._election.answer(message, self._clock.now_s())
            if self._election.is_written and not self._note.has_journal:
                self._update_note(has_journal=True)
            return reply
        except OSError:
            why = f"node {self._brief.node} has no vote: {self._election.trouble}"
            if is_news:
                complain(f"resihp: warning: {why}")
            return JournalRefused(why=why)

    def _run_at(self, run_dir: str) -> None:
        """The journal of this node is in the run's directory."""
        if self._election.is_open:
            if run_dir != self._note.run_dir:
                raise AuthError(f"a coordinator of another run: {run_dir}")
            return
        folder = RunDir.make(Path(run_dir))
        path = folder.journal_path(self._brief.node)
        self._election.open(path, was_written=self._note.has_journal)
        self._update_note(run_dir=run_dir)
        self._supervisors.broadcast(self._welcome())

    def _follow(self, channel: NodeChannel) -> None:
        if self._leader is channel:
            return
        if self._leader is not None:
            self._leader.close()
        self._leader = channel
        self._supervisors.tell_gone()
        if self._note.stop is not None:
            channel.send(self._note.stop)
        self._check_left()

    def _led(self, channel: NodeChannel) -> None:
        """Our coordinator leads; what it was told before that it may not have heard."""
        self._operators.led(channel)
        if self._turned_away is not None:
            channel.send(self._turned_away)
            self._turned_away = None

    def _obey(self, message: NodeMessage) -> None:
        match message:
            case ToRanks():
                self._supervisors.send(message.ranks, message.payload)
            case EvictRank():
                self._supervisors.evict(message.rank)
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
        self._update_note(
            exit_code=message.exit_code, reason=message.reason, lost_nodes=message.lost_nodes
        )
        self._supervisors.broadcast(self._stop_message())
        self._ended.set()
        self._check_left()

    def _stop_message(self) -> Stop:
        assert self._note.exit_code is not None
        return Stop(reason=self._note.reason, exit_code=self._note.exit_code)

    def _check_left(self) -> None:
        if self._ended.is_set() and not self._supervisors:
            self._left.set()
            self._tell(Drained())

    # --- connections

    def _admit(self, identity: Identity) -> str | None:
        if identity.job != self._job.job.name:
            return f"this is job {self._job.job.name!r}, not {identity.job!r}"
        match identity.role:
            case "operator" | "coordinator":
                return None
            case "supervisor":
                return self._supervisors.why_not(identity.rank)
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
                    await self._serve_candidate(NodeChannel(reader, writer, seals))
                case _:
                    channel = Channel(reader, writer, seals)
                    await self._supervisors.serve(identity.rank, channel, self._greeting())
                    self._check_left()
        except ProcessLookupError:
            pass  # a supervisor that died right after its first message
        except Exception as error:
            if not connection_lost(error):
                raise
            num = self._gate.num_refused
            if is_worth_a_line(num):
                why = str(error) or type(error).__name__
                self._turned_away = TurnedAway(why=why, refused_so_far=num)
        finally:
            del self._connections[task]
            writer.close()

    def _welcome(self) -> Welcome:
        assert self._note.run_dir is not None
        return Welcome(run_dir=self._note.run_dir, job=self._brief.job)

    def _greeting(self) -> list[Message]:
        """What a supervisor is told first, as far as it is known."""
        greeting: list[Message] = []
        if self._note.run_dir is not None:
            greeting.append(self._welcome())
        if self._note.exit_code is not None:
            greeting.append(self._stop_message())
        return greeting

    def _heard(self, message: Message) -> bool:
        """Whether a supervisor's message was for us alone; some faults are for us to bring."""
        match message:
            case AskStop():
                self.ask_stop(message.reason, message.exit_code)
                return True
            case Fault(kind="kill_monitor"):
                self._dying = asyncio.create_task(die(self._told()))
            case Fault(kind="hang_monitor"):
                hang()
            case _:
                pass
        return False

    async def _told(self) -> None:
        """What was said to the coordinator has left."""
        if self._leader is not None:
            await self._leader.drain(self._timing.beat_s)

    async def _tick(self) -> None:
        """Once per beat: the beat of this node, and what becomes of it without a leader."""
        while True:
            await next_look(self._timing.beat_s)
            now_s = self._clock.now_s()
            watch = self._election.watch
            self._tell(self._supervisors.tick(watch.beats(now_s)))
            is_orphan = self._election.is_open and watch.must_fence(now_s)
            if is_orphan and not self._is_fenced:
                self._supervisors.broadcast(Fence(reason="no quorum of nodes"))
            self._is_fenced = is_orphan
            is_lost = watch.is_alone(now_s) if self._election.is_open else now_s > self._begin_by_s
            if is_lost and not self._ended.is_set():
                self._give_up(self._no_quorum())
            # A single node whose journal is on a full disk can have no coordinator that ends it.
            silent_s = now_s - self._election.trouble_since_s
            is_single = len(self._brief.addresses) == 1
            if is_single and silent_s > 2 * self._timing.decide_s and not self._ended.is_set():
                self._give_up(f"nobody can lead the job: {self._election.trouble}")

    def _no_quorum(self) -> str:
        return (
            f"node {self._brief.node} hears no quorum of the job's nodes, which is more than half "
            "of them, or half with the lowest: see docs/operating.md, What is survived"
        )

    def _give_up(self, reason: str) -> None:
        complain(f"resihp: error: {reason}")
        self._end(Ended(exit_code=1, reason=reason))
