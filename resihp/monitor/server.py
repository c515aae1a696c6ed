"""The coordinator as a process among others: monitors there, the run directory here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from resihp.config import JobConfig
from resihp.errors import AuthError, WireError
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
    StepsTakenBack,
)
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.links import Links
from resihp.monitor.node.brief import Brief
from resihp.monitor.observations import ObservationLog
from resihp.monitor.rendezvous import Place, write_place
from resihp.monitor.run_dir import RunDir
from resihp.monitor.summary import step_line, summary
from resihp.wire.clock import Clock
from resihp.wire.messages import (
    AskWhere,
    At,
    ExecutorStarted,
    Fault,
    Fence,
    Inject,
    KillRank,
    Message,
    Positions,
    Refused,
    Reply,
    Resend,
    decode,
    encode,
)
from resihp.wire.nodes import (
    Drained,
    Ended,
    EvictRank,
    FromOperator,
    FromRank,
    NodeBeat,
    NodeMessage,
    RankGone,
    StopAsked,
    ToOperator,
    ToRanks,
    TurnedAway,
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
    """Leads one job until it ends and every supervisor has left (or the grace is over)."""

    def __init__(
        self,
        job: JobConfig,
        coordinator: Coordinator,
        run_dir: RunDir,
        brief: Brief,
        term: int,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._brief = brief
        self._clock = clock
        self._say = say
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._links = Links(
            brief,
            term,
            job.job.name,
            self._timing,
            run_dir=str(run_dir.path),
            hear=self._hear,
            reached=self._reached,
            lost=self._lost,
        )
        self._here: set[int] = set()
        """Ranks whose supervisor is there."""
        self._pids: dict[int, int] = {}
        """Of the executor that each rank started last."""
        self._drained: set[int] = set()
        self._observations = ObservationLog(run_dir.traces_path)
        self._censuses: list[_Census] = []
        self._answering: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._all_left = asyncio.Event()
        self.exit_code = 1
        self.reason = ""

    async def serve(self) -> int:
        """Run the job; its exit code."""
        host, port = self._brief.addresses[self._brief.node]
        write_place(self._run_dir.control_path, Place(port, self._brief.secret, host))
        self._links.open()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._ended.wait()
            async with asyncio.timeout(2 * self._timing.grace_s):
                await self._all_left.wait()
        except TimeoutError:
            self._say("some supervisors did not leave in time")
        finally:
            for task in (ticker, *self._answering):
                task.cancel()
            await asyncio.gather(ticker, *self._answering, return_exceptions=True)
            self._finish()
            await self._links.close(self._timing.grace_s)
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
        self._run_dir.control_path.unlink()
        self._observations.close()
        if self._observations.trouble:
            self._say(self._observations.trouble)
        self._run_dir.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.beat_s)
            self._perform(self._coordinator.tick(self._clock.now_s()))

    # --- monitors

    def _reached(self, node: int) -> None:
        ranks = tuple(self._brief.ranks(node, self._job.parallel.world))
        again = Resend(from_step=len(self._coordinator.records))
        self._links.send(node, ToRanks(ranks=ranks, payload=encode(again)))

    def _lost(self, node: int, why: str) -> None:
        self._here -= set(self._brief.ranks(node, self._job.parallel.world))

    def _hear(self, node: int, message: NodeMessage) -> None:
        now_s = self._clock.now_s()
        match message:
            case NodeBeat():
                for rank, beat in message.beats.items():
                    self._perform(self._coordinator.receive(rank, beat, now_s))
            case FromRank():
                self._hear_rank(message.rank, decode(message.payload), now_s)
            case RankGone():
                self._here.discard(message.rank)
                self._perform(self._coordinator.disconnected(message.rank, now_s))
            case FromOperator():
                task = asyncio.create_task(self._answer(node, message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case TurnedAway():
                row: dict[str, object] = {"node": node, "why": message.why}
                row["refused_so_far"] = message.refused_so_far
                self._run_dir.event("connection_refused", row, now_s)
            case StopAsked():
                self.stop(message.reason, message.exit_code)
            case Drained():
                self._drained.add(node)
                self._check_left()
            case _:
                raise AuthError(f"a monitor does not send {type(message).__name__}")

    def _hear_rank(self, rank: int, message: Message, now_s: float) -> None:
        self._here.add(rank)
        if isinstance(message, ExecutorStarted):
            if self._pids.get(rank) == message.pid:
                return  # said again
            self._pids[rank] = message.pid
        if isinstance(message, At):
            for census in self._censuses:
                census.add(rank, message)
        self._perform(self._coordinator.receive(rank, message, now_s))
        if isinstance(message, Fault) and message.kind == "kill_coordinator":
            os.kill(os.getpid(), signal.SIGKILL)  # all that it knows is on disk or said again

    def _check_left(self) -> None:
        if self._ended.is_set() and self._links.connected <= self._drained:
            self._all_left.set()

    def _send(self, rank: int, message: Message) -> None:
        node = self._brief.node_of(rank, self._job.parallel.world)
        self._links.send(node, ToRanks(ranks=(rank,), payload=encode(message)))

    # --- operators

    async def _answer(self, node: int, request: FromOperator) -> None:
        try:
            message = decode(request.payload)
        except WireError as error:
            answer: Message = Refused(text=str(error))
        else:
            match message:
                case KillRank():
                    answer = self._kill(message.rank)
                case Inject():
                    answer = self._inject(message)
                case AskWhere():
                    answer = await self._positions()
                case _:
                    answer = Refused(text=f"{type(message).__name__} is no request")
        self._links.send(node, ToOperator(number=request.number, payload=encode(answer)))

    async def _positions(self) -> Positions:
        """Where the ranks are that answer within a moment."""
        census = _Census(self._coordinator.alive & self._here)
        self._censuses.append(census)
        try:
            for rank in census.missing:
                self._send(rank, AskWhere())
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
        self._send(rank, Fence(reason="operator"))
        return Reply(text=f"rank {rank}: SIGKILL sent to its executor")

    def _inject(self, order: Inject) -> Reply | Refused:
        refusal = self._unfit(order.rank)
        if refusal is not None:
            return Refused(text=refusal)
        self._run_dir.event(
            "inject", {"rank": order.rank, "fault": order.fault}, self._clock.now_s()
        )
        self._send(order.rank, order)
        return Reply(text=f"rank {order.rank}: {order.fault.get('kind')} is on its way")

    def _unfit(self, rank: int) -> str | None:
        """Why nothing can be done to `rank`; None: it can."""
        alive = sorted(self._coordinator.alive)
        if rank not in alive or rank not in self._here:
            return f"rank {rank} is not alive; alive ranks: {alive}"
        if self._coordinator.phase is Phase.STARTING:
            return "the job has not begun yet"
        if self._coordinator.phase is Phase.STOPPING:
            return "the job is ending"
        return None

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(rank, message):
                    self._send(rank, message)
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
                case StepsTakenBack(version):
                    self._run_dir.take_back(version)
                case Seen(rank, observed):
                    self._observations.add(rank, observed)
                case Say(line):
                    self._say(line)
                case Evict(rank):
                    node = self._brief.node_of(rank, self._job.parallel.world)
                    self._links.send(node, EvictRank(rank=rank))
                case End(exit_code, reason):
                    self._end(exit_code, reason)

    def _end(self, exit_code: int, reason: str) -> None:
        self.exit_code, self.reason = exit_code, reason
        for node in self._links.connected:
            self._links.send(node, Ended(exit_code=exit_code, reason=reason))
        self._ended.set()
        self._check_left()
