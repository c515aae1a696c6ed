"""The coordinator as a process among others: monitors there, the run directory here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from resihp.config import JobConfig
from resihp.errors import AuthError
from resihp.monitor.actions import (
    Answer,
    CompleteVersion,
    Decide,
    DropVersion,
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
from resihp.monitor.checkpoints import SavePlace, save_place
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.desk import Desk
from resihp.monitor.helm import Helm, Order
from resihp.monitor.inject import hang
from resihp.monitor.links import Links
from resihp.monitor.looks import next_look
from resihp.monitor.node.brief import Brief
from resihp.monitor.node.server import DEPOSED, HOPELESS
from resihp.monitor.observations import ObservationLog
from resihp.monitor.quorum.leadership import Leadership
from resihp.monitor.quorum.outcomes import Deposed, ToNode
from resihp.monitor.rendezvous import Place, write_place
from resihp.monitor.run_dir import RunDir
from resihp.monitor.summary import step_line, summary
from resihp.monitor.version_disk import VersionDisk
from resihp.wire.clock import Clock
from resihp.wire.console import complain
from resihp.wire.messages import (
    At,
    Fault,
    Hello,
    Message,
    Refused,
    Resend,
    Resent,
    StepRecord,
    What,
    decode,
    encode,
)
from resihp.wire.nodes import (
    Drained,
    Ended,
    EvictRank,
    FromOperator,
    FromRank,
    JournalRefused,
    NodeBeat,
    NodeMessage,
    RankGone,
    StopAsked,
    ToOperator,
    ToRanks,
    TurnedAway,
)
from resihp.wire.quorum import Accepted, Entry, Promise, Superseded
from resihp.wire.timing import Timing

__all__ = ["CoordinatorServer"]

ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes that are no error."""


class CoordinatorServer:
    """Leads one job until it ends and every supervisor has left (or the grace is over)."""

    def __init__(
        self,
        job: JobConfig,
        coordinator: Coordinator,
        run_dir: RunDir,
        brief: Brief,
        leadership: Leadership,
        clock: Clock,
        say: Callable[[str], None],
        versions: SavePlace | None = None,
    ) -> None:
        """`versions`: where the coordinator has them saved."""
        self._job = job
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._brief = brief
        self._clock = clock
        self._say = say
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        nodes = range(len(brief.addresses))
        ranks_of = {node: self._ranks(node) for node in nodes}
        self._helm = Helm(coordinator, leadership, ranks_of, self._known_records)
        self._links = Links(brief, self._timing, str(run_dir.path), self)
        self._here: set[int] = set()
        """Ranks whose supervisor is there, and has said again what we may have missed."""
        self._drained: set[int] = set()
        self._observations = ObservationLog(run_dir.traces_path)
        self._desk = Desk(
            job,
            coordinator,
            run_dir,
            clock,
            num_nodes=len(nodes),
            here=self._here,
            send=self._send,
            wish=self._wish,
        )
        self._has_won = False
        self._has_ended = False
        self._versions = None
        if versions is not None:
            self._versions = VersionDisk(versions.directory, job.checkpoint.keep, self._completed)
        self._ended = asyncio.Event()
        self._all_left = asyncio.Event()
        self.exit_code = 1
        self.reason = ""

    async def serve(self) -> int:
        """Run the job; its exit code, or DEPOSED, or HOPELESS where nobody can lead."""
        tasks = [asyncio.create_task(self._links.keep(node)) for node in self._links.nodes]
        tasks.append(asyncio.create_task(self._tick()))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # none of them ends but by a bug of ours
            if self._has_won:
                await self._let_leave()
        finally:
            for task in (ended, *tasks):
                task.cancel()
            await asyncio.gather(ended, *tasks, return_exceptions=True)
            await self._desk.leave()
        return self.exit_code

    async def _let_leave(self) -> None:
        """The job is over: wait for the supervisors, then say how it went."""
        try:
            async with asyncio.timeout(2 * self._timing.grace_s):
                await self._all_left.wait()
        except TimeoutError:
            self._say("some supervisors did not leave in time")
        if self._versions is not None:  # a version whose parts are there is completed also now
            await self._versions.settle()
        self._finish()
        await self._links.drain(self._timing.grace_s)

    def stop(self, reason: str, exit_code: int) -> None:
        """End the job in order, from a signal."""
        self._perform(self._helm.stop(reason, exit_code, self._clock.now_s()))

    def _finish(self) -> None:
        headline = self.reason
        if self.exit_code not in ORDERLY:
            complain(f"resihp: error: {self.reason}")
            headline = "failed"
        self._say(
            summary(
                self._coordinator.records,
                self._coordinator.incidents,
                self._coordinator.num_plans,
                self._run_dir.path,
                headline,
                begun_at=self._coordinator.begun_at,
            )
        )
        self._run_dir.control_path.unlink(missing_ok=True)
        self._observations.close()
        if self._observations.trouble:
            self._say(self._observations.trouble)
        self._run_dir.close()
        if num := self._run_dir.num_missing:
            self._say(f"the disk did not take {num} rows of the run directory")

    async def _tick(self) -> None:
        while True:
            await next_look(self._timing.beat_s)
            self._perform(self._helm.tick(self._clock.now_s()))
            if self._helm.leadership.leads:
                self._run_dir.flush()
                self._observations.flush()

    # --- monitors

    def reached(self, node: int) -> None:
        """See `Hearer`."""
        self._perform(self._helm.connected(node, self._clock.now_s()))

    def lost(self, node: int) -> None:
        """See `Hearer`."""
        self._here.difference_update(self._ranks(node))
        self._perform(self._helm.disconnected(node, self._clock.now_s()))

    def refused(self, node: int) -> None:
        """See `Hearer`."""
        self._perform(self._helm.refused(node, self._clock.now_s()))

    def hear(self, node: int, message: NodeMessage) -> None:
        """See `Hearer`."""
        now_s = self._clock.now_s()
        self._perform(self._helm.look(now_s))
        match message:
            case Promise() | Accepted() | Superseded():
                self._perform(self._helm.answer(node, message, now_s))
                if self._has_ended:
                    self._links.send(node, self._end_message())
            case NodeBeat():
                self._perform(self._helm.beat(node, message.number, message.beats, now_s))
            case Ended():
                self._perform(self._helm.over(message.reason, message.exit_code, now_s))
            case RankGone():
                self._lose(message)
            case StopAsked():
                self.stop(message.reason, message.exit_code)
            case Drained():
                self._drained.add(node)
                self._check_left()
            case _ if self._helm.leadership.leads:
                self._hear_node(node, message, now_s)
            case FromOperator() if self._helm.leadership.has_won:
                why = "the coordinator stood still, and makes sure that it leads; try again"
                self._reply(node, message.number, Refused(text=why))
            case _:
                pass  # it is said again once we lead

    def _hear_node(self, node: int, message: NodeMessage, now_s: float) -> None:
        match message:
            case FromRank():
                self._hear_rank(message.rank, decode(message.payload), now_s)
            case FromOperator():
                self._desk.ask(message.payload, partial(self._reply, node, message.number))
            case TurnedAway():
                row: dict[str, object] = {"node": node, "why": message.why}
                row["refused_so_far"] = message.refused_so_far
                self._run_dir.event("connection_refused", row, now_s)
            case JournalRefused():
                self._coordinator.journal_refused(node, message.why)
                self._run_dir.event("no_vote", {"node": node, "why": message.why}, now_s)
            case _:
                raise AuthError(f"a monitor does not send {type(message).__name__}")

    def _known_records(self, entry: Entry) -> list[StepRecord]:
        """Another coordinator led before: what it left in the run's directory, and on disk.

        Read before anything is decided, so on the loop.
        """
        if self._versions is not None:
            place = save_place(self._job, self._run_dir.path)
            assert place is not None
            self._coordinator.remember_versions(place.versions)
        past = self._run_dir.past()
        self._coordinator.remember(past.memory)
        return past.before(entry)

    def _won(self) -> None:
        """We lead from here on: operators are to ask us, and the job's end is ours to tell."""
        self._has_won = True
        host, port = self._brief.addresses[self._brief.node]
        place = Place(port, self._brief.secret, host)
        try:
            write_place(self._run_dir.control_path, place)
        except AuthError as error:
            self._run_dir.troubled(str(error))
        fields: dict[str, object] = {"term": self._helm.leadership.term, "node": self._brief.node}
        self._run_dir.event("leads", fields, self._clock.now_s())

    def _ranks(self, node: int) -> range:
        return self._brief.ranks(node, self._job.parallel.world)

    def _lose(self, gone: RankGone) -> None:
        self._here.discard(gone.rank)
        self._perform(
            self._helm.rank_gone(gone.rank, self._clock.now_s(), gone.evidence, gone.seen_s)
        )

    def _hear_rank(self, rank: int, message: Message, now_s: float) -> None:
        match message:
            case Hello():
                self._perform(self._helm.from_rank(rank, message, now_s))
                return
            case Resent():
                self._here.add(rank)
                if not message.has_executor:
                    # Its first words went to nobody: no coordinator was there.
                    again = Hello(pid=0, has_executor=False)
                    self._perform(self._helm.from_rank(rank, again, now_s))
                return
            case At():
                self._desk.heard(rank, message)
            case _:
                pass
        if rank in self._here:
            self._perform(self._helm.from_rank(rank, message, now_s))
        if isinstance(message, Fault) and message.kind == "kill_coordinator":
            os.kill(os.getpid(), signal.SIGKILL)  # all that it knows is on disk or said again
        if isinstance(message, Fault) and message.kind == "hang_coordinator":
            hang()

    def _check_left(self) -> None:
        if self._ended.is_set() and self._links.connected <= self._drained:
            self._all_left.set()

    def _send(self, rank: int, message: Message) -> None:
        if isinstance(message, Resend):
            # Until it has answered, what it says may have gaps, and is not heard.
            self._here.discard(rank)
        node = self._brief.node_of(rank, self._job.parallel.world)
        self._links.send(node, ToRanks(ranks=(rank,), payload=encode(message)))

    def _wish(self, what: What) -> None:
        self._perform(self._helm.wish(what, self._clock.now_s()))

    def _reply(self, node: int, number: int, answer: Message) -> None:
        self._links.send(node, ToOperator(number=number, payload=encode(answer)))

    # --- actions

    def _perform(self, orders: Sequence[Order]) -> None:
        if self._helm.leadership.leads and not self._has_won:
            self._won()
        for order in orders:
            match order:
                case Send(rank, message):
                    self._send(rank, message)
                case ToNode(node, message):
                    self._links.send(node, message)
                case CompleteVersion() | DropVersion():
                    assert self._versions is not None
                    self._versions.change(order)
                case Decide():
                    raise AssertionError("the helm decides")
                case Deposed(why):
                    self._run_dir.event("deposed", {"why": why}, self._clock.now_s())
                    is_hopeless = self._helm.leadership.is_hopeless
                    self.exit_code = HOPELESS if is_hopeless else DEPOSED
                    self._has_won = False
                    self._ended.set()
                case Log(kind, fields):
                    self._run_dir.event(kind, fields, self._clock.now_s())
                case PlanMade(generation, text, cause, steady):
                    self._run_dir.plan(generation, text, cause, steady)
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
                case Answer(what, answer):
                    self._desk.answer(what, answer)
                case Evict(rank):
                    node = self._brief.node_of(rank, self._job.parallel.world)
                    self._links.send(node, EvictRank(rank=rank))
                case End(exit_code, reason):
                    self._end(exit_code, reason)

    def _completed(self, name: str, trouble: str, pruned: Sequence[str]) -> None:
        self._perform(self._helm.completed(name, trouble, pruned, self._clock.now_s()))

    def _end(self, exit_code: int, reason: str) -> None:
        self.exit_code, self.reason, self._has_ended = exit_code, reason, True
        for node in self._links.connected:
            self._links.send(node, self._end_message())
        self._ended.set()
        self._check_left()

    def _end_message(self) -> Ended:
        return Ended(
            exit_code=self.exit_code,
            reason=self.reason,
            was_over=self._helm.was_over,
            lost_nodes=tuple(sorted(self._helm.leadership.lost)),
        )
