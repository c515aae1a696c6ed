"""The coordinator: who is alive, which generation runs which plan, and when to go on.

Pure protocol logic: messages and ticks in, actions out; no socket, no clock of its own.

    STARTING --all ready--> PROPOSING --decided--> OPENING --all joined--> RUNNING --> STOPPING
                               ^                                             |   all finished
                               |                            rank lost (in any phase)
                               +---------------- SETTLING <------------------+
                                                     ^
    RESUMING --not all run it------------------------+     (another coordinator led before)
        +------all run it--> RUNNING

A loss closes the generation: survivors stop work at once, settle on one version of the state,
get a new verified plan, rebuild their groups, move shards, and run again (DESIGN §5, §6).
Each part has a room of its own in `coordination`; here are only the ways into them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from resihp.config import JobConfig
from resihp.errors import UserError
from resihp.ir.model import Plan
from resihp.monitor.actions import Action
from resihp.monitor.checkpoints import SavedVersion, SavePlace
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.deciding import Deciding
from resihp.monitor.coordination.hanging import Hanging
from resihp.monitor.coordination.liveness import Liveness
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.opening import Opening
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.planning import Planning
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.repeating import Repeating
from resihp.monitor.coordination.resuming import Resuming
from resihp.monitor.coordination.reviving import Reviving
from resihp.monitor.coordination.running import Running
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.coordination.settling import Settling
from resihp.monitor.coordination.starting import Starting
from resihp.monitor.coordination.wishing import Wishing
from resihp.monitor.incident import Incident
from resihp.monitor.last_words import users_mistake
from resihp.monitor.memory import Memory
from resihp.monitor.planner import Planner
from resihp.monitor.progress import Progress
from resihp.monitor.restarts import Restarts
from resihp.wire.messages import (
    At,
    Audited,
    Beat,
    ExecutorExited,
    ExecutorStarted,
    Fault,
    Fence,
    Finished,
    Hello,
    Joined,
    Message,
    NoBuddyCopy,
    Observed,
    PartSaved,
    Positions,
    Ready,
    SaveFailed,
    Settled,
    StepDone,
    StepRecord,
    StoreOpened,
    Trouble,
    VersionRefused,
    What,
)
from resihp.wire.quorum import Entry

__all__ = ["Coordinator", "Phase"]


class Coordinator:
    """One job. Call `receive`, `disconnected` and `tick`; carry out what they return."""

    def __init__(
        self,
        job: JobConfig,
        planner: Planner,
        secret: bytes,
        now_s: float,
        place: SavePlace | None = None,
    ) -> None:
        """`place`: where versions are saved; None: nowhere."""
        self._core = core = Core(job, now_s)
        self._progress = progress = Progress(now_s)
        restarts = Restarts(job.rejoin.restarts, core.timing.silent_s)
        self._rejoining = Rejoining(core, planner, restarts)
        self._saving = saving = Saving(core, place)
        self._reviving = Reviving(core, self._rejoining, saving)
        self._membership = Membership(core, self._rejoining, self._reviving)
        self._hanging = Hanging(core, self._membership, progress)
        self._liveness = Liveness(core, self._membership, self._hanging, progress)
        self._running = Running(core, self._membership, self._rejoining, progress)
        self._wishing = Wishing(core, saving)
        self._opening = Opening(
            core, secret, self._membership, self._rejoining, self._running, saving
        )
        self._deciding = Deciding(core, self._opening)
        self._planning = Planning(
            core, planner, self._rejoining, self._reviving, self._deciding, saving
        )
        self._settling = Settling(
            core, self._membership, self._reviving, self._running, self._planning, saving
        )
        self._starting = Starting(core, self._planning, restarts)
        self._repeating = Repeating(
            core, self._starting, self._opening, saving, self._rejoining, self._wishing
        )
        self._resuming = Resuming(core, self._membership, self._running, saving)

    # --- inputs

    def receive(self, rank: int, message: Message, now_s: float) -> list[Action]:
        """A message of `rank`."""
        core = self._core
        core.now_s = now_s
        self._liveness.heard(rank)
        if isinstance(message, Hello):
            self._repeating.reached((rank,))
        if core.phase is not Phase.STOPPING and self._is_news(rank, message):
            hear = self._dispatch if rank in core.alive else self._hear_of_the_lost
            hear(rank, message)
        return self._taken()

    def disconnected(
        self,
        rank: int,
        now_s: float,
        evidence: str = "its supervisor is gone",
        seen_s: float | None = None,
    ) -> list[Action]:
        """The supervisor of `rank` is gone, and with it (by the kernel) its executor.

        `seen_s`: when its monitor saw its end.
        """
        core = self._core
        core.now_s = now_s
        if core.phase is not Phase.STOPPING:
            if rank in core.alive:
                if core.phase is Phase.STARTING:
                    self._starting.disconnected(rank, evidence)
                else:
                    core.book.ended(rank, None, seen_s)
                    self._membership.disconnected(rank, evidence)
            else:
                self._rejoining.gone(rank)
        return self._taken()

    def resume(self, entry: Entry, records: Sequence[StepRecord], now_s: float) -> list[Action]:
        """Take over from another coordinator, whose newest decided entry is `entry`.

        `records`: of the steps that are known to be committed, from the first one on.
        """
        core = self._core
        core.now_s = now_s
        self._resuming.resume(entry, records)
        self._rejoining.resumed()
        self._liveness.expect_all()
        return self._taken()

    def remember(self, memory: Memory) -> None:
        """What other coordinators of this job knew; before `resume`."""
        self._core.executors.update(memory.executors)
        self._core.told_lost.update(memory.told_lost)
        self._core.book.incidents[:0] = memory.incidents
        self._running.num_plans += memory.num_plans
        self._rejoining.remember(memory)
        self._saving.remember(memory.refused)

    def stood_still(self, slept_s: float, now_s: float) -> list[Action]:
        """This process did nothing for `slept_s`, until now: nobody else was late by that much."""
        core = self._core
        core.now_s = now_s
        core.log("stood_still", slept_s=slept_s)
        self._liveness.stood_still(slept_s)
        self._rejoining.stood_still(slept_s)
        self._starting.stood_still(slept_s)
        self._wishing.stood_still(slept_s)
        return self._taken()

    def remember_versions(self, versions: Sequence[SavedVersion]) -> None:
        """What is saved by now, newest first: other coordinators may have completed some since
        this one was started, and pruned others. Before `remember`."""
        self._saving.versions = list(versions)

    def decided(self, generation: int, now_s: float) -> list[Action]:
        """A quorum has accepted the entry of `generation`."""
        core = self._core
        core.now_s = now_s
        self._deciding.decided(generation)
        return self._taken()

    def journal_refused(self, node: int, why: str) -> None:
        """The monitor of `node` cannot write down what it would accept."""
        self._deciding.refused(node, why)

    def reached(self, ranks: Collection[int], now_s: float) -> list[Action]:
        """Messages reach `ranks` again, after they may not have for a while."""
        core = self._core
        core.now_s = now_s
        self._repeating.reached(ranks)
        return self._taken()

    def hit(self, rank: int, at_s: float) -> None:
        """Somebody is about to kill `rank` (for the detection time of the incident)."""
        self._core.book.hit(rank, at_s)

    def stop(self, reason: str, exit_code: int, now_s: float) -> list[Action]:
        """End the job from outside (a signal), once its state is saved.

        Many may say so, and say it again: it is one wish, the first.
        """
        core = self._core
        core.now_s = now_s
        is_news = core.phase is not Phase.STOPPING and self._saving.ending is None
        is_open = core.phase not in (Phase.SETTLING, Phase.RESUMING)
        if is_news and self._saving.end(reason, exit_code) and is_open:
            self._membership.close()
        return self._taken()

    def over(self, reason: str, exit_code: int, now_s: float) -> list[Action]:
        """Another coordinator has ended the job, as a monitor says."""
        core = self._core
        core.now_s = now_s
        if core.phase is not Phase.STOPPING:
            core.stop(reason, exit_code)
        return self._taken()

    def wish(self, what: What, now_s: float) -> list[Action]:
        """An operator wants all ranks to do `what`; an `Answer` follows, now or later."""
        core = self._core
        core.now_s = now_s
        self._wishing.wish(what)
        return self._taken()

    def completed(
        self, name: str, trouble: str, pruned: Sequence[str], now_s: float
    ) -> list[Action]:
        """What became of a `CompleteVersion`: '' or why the version is not complete."""
        core = self._core
        core.now_s = now_s
        self._saving.completed(name, trouble, pruned)
        self._wishing.completed(name, trouble)
        return self._taken()

    def tick(self, now_s: float) -> list[Action]:
        """Time passes: act on whatever took too long."""
        core = self._core
        core.now_s = now_s
        self._liveness.pauses()
        waited_s = now_s - core.phase_since_s
        match core.phase:
            case Phase.STARTING:
                self._starting.tick(waited_s)
            case Phase.RESUMING if waited_s > core.timing.silent_s:
                self._resuming.expired(waited_s)
            case Phase.SETTLING:
                self._settling.tick(waited_s)
            case Phase.SAVING:
                self._saving.tick(waited_s)
            case Phase.OPENING if waited_s > core.timing.join_s:
                self._opening.expired(waited_s)
            case Phase.OPENING | Phase.RUNNING:
                self._liveness.tick()
            case Phase.PROPOSING if waited_s > core.timing.decide_s:
                self._planning.undecided(waited_s)
            case Phase.RESUMING | Phase.PROPOSING | Phase.STOPPING:
                pass
        if core.phase is not Phase.STOPPING:
            self._liveness.check_silence()
            self._rejoining.tick()
        return self._taken()

    def _taken(self) -> list[Action]:
        self._saving.check()
        self._wishing.check()
        return self._core.take()

    def _is_news(self, rank: int, message: Message) -> bool:
        """Not: a start that is said again, and what is said of an executor before the newest."""
        core = self._core
        match message:
            case ExecutorStarted():
                if core.executors.get(rank) == message.pid:
                    return False
                core.executors[rank] = message.pid
                core.told_lost.discard(rank)
                core.log("executor_started", rank=rank, pid=message.pid)
                return True
            case Beat() | ExecutorExited():
                return core.is_of_newest(rank, message.pid)
            case _:
                return True

    def _dispatch(self, rank: int, message: Message) -> None:
        """What is of a generation that is over is dropped by the room it belongs to."""
        match message:
            case Ready():
                self._starting.ready(rank, message)
                self._settling.check()
            case Hello() if self._core.phase is Phase.STARTING:
                self._starting.connected(rank, has_executor=message.has_executor)
            case Hello() if not message.has_executor:
                self._membership.disconnected(rank, "its supervisor was started again")
                self._rejoining.waits(rank)
            case ExecutorStarted():
                self._starting.started(rank)
            case ExecutorExited():
                self._exited(rank, message)
            case Beat():
                self._liveness.beat(rank, message)
                self._resuming.beat(rank, message)
            case Fault():
                self._liveness.fault(rank, message)
            case Trouble():
                self._liveness.trouble(rank, message)
            case NoBuddyCopy():
                self._liveness.no_copy(rank, message)
            case At():
                self._hanging.at(rank, message)
            case Settled():
                self._resuming.settled(message)
                self._settling.settled(rank, message)
            case StoreOpened():
                self._opening.store_opened(message)
                self._resuming.store_opened(message)
            case Joined():
                self._opening.joined(rank, message)
                self._resuming.joined(rank, message)
            case PartSaved():
                self._saving.part_saved(rank, message)
            case SaveFailed():
                self._saving.part_failed(rank, message)
                self._wishing.save_failed(message)
            case VersionRefused():
                self._saving.refused(rank, message)
                if self._core.opens(message.generation):
                    self._membership.close()
            case StepDone():
                self._running.committed(message.record, message.generation)
                if message.observed is not None:
                    self._running.observed(rank, message.observed)
            case Observed():
                self._running.observed(rank, message)
            case Audited():
                self._running.audited(message)
                self._wishing.audited(message)
            case Finished():
                self._running.finished(rank, message)
            case _:
                pass  # not for the coordinator

    def _exited(self, rank: int, message: ExecutorExited) -> None:
        """The executor of a rank that is counted on ended."""
        core, mistake = self._core, users_mistake(message)
        if mistake is not None:
            core.log("refused", rank=rank, why=mistake)
            core.stop(mistake, UserError.exit_code)
        elif core.phase is Phase.STARTING:
            self._starting.exited(rank, message)
        else:
            self._membership.exited(rank, message)

    def _hear_of_the_lost(self, rank: int, message: Message) -> None:
        """Of a rank that no plan counts on: whether it comes back."""
        match message:
            case Hello() if not message.has_executor:
                self._rejoining.waits(rank)
            case Beat():
                self._rejoining.beat(rank)
                self._membership.expel(rank, message)
            case Ready():
                self._rejoining.ready(rank, message)
                if rank in self._core.returned:
                    self._reviving.back(rank)
            case ExecutorStarted():
                self._rejoining.started(rank)
            case ExecutorExited():
                self._rejoining.exited(rank, message)
            case Fault():
                self._liveness.fault(rank, message)
            case _:
                pass  # of a rank that is dead

    # --- what is known

    def fence(self, rank: int, reason: str) -> Fence:
        """The order to kill the executor that `rank` has now."""
        return self._core.fence(rank, reason)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self._core.job.parallel.world

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self._core.phase

    @property
    def generation(self) -> int:
        """The one that opens, runs or settles."""
        return self._core.generation

    @property
    def steady_plan(self) -> Plan | None:
        """What the steps to come run, as far as is known."""
        plan = self._core.plan
        return None if plan is None else (plan.steady or plan).plan

    @property
    def records(self) -> list[StepRecord]:
        """Of all committed steps, in order."""
        return self._core.records

    @property
    def begun_at(self) -> int:
        """The step of the saved version that all began with, at last; 0: untrained parameters."""
        return self._core.start.version

    @property
    def num_plans(self) -> int:
        """Generations that ran."""
        return self._running.num_plans

    @property
    def incidents(self) -> list[Incident]:
        """What happened so far, in order."""
        return self._core.book.incidents

    @property
    def alive(self) -> frozenset[int]:
        """Ranks whose executor runs."""
        return frozenset(self._core.alive)

    @property
    def returned(self) -> frozenset[int]:
        """Lost ranks that are back, and that no plan counts on yet."""
        return frozenset(self._core.returned)

    def positions(self, at: dict[int, At], now_s: float) -> Positions:
        """Where the ranks are: what some answered, and what is known of all."""
        core = self._core
        heard_s = self._liveness.heard_s
        return Positions(
            generation=core.generation,
            phase=core.phase.value,
            alive=tuple(sorted(core.alive)),
            at=at,
            heard_s={rank: now_s - since_s for rank, since_s in heard_s.items()},
            beats=self._progress.beats,
            out=self._rejoining.standings(),
        )
