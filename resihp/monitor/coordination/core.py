"""What all rooms of the coordinator share: who is alive, which generation, what is to be done."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.config import JobConfig
from resihp.monitor.actions import Action, End, Log, Say, Send, StepsTakenBack
from resihp.monitor.chunk_times import ChunkTimes
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.incident import IncidentBook
from resihp.monitor.planner import VerifiedPlan
from resihp.wire.messages import (
    Commit,
    Fence,
    Joined,
    Message,
    Ready,
    Request,
    Respawn,
    Settled,
    StepRecord,
    Stop,
)
from resihp.wire.timing import Timing

__all__ = ["Core", "Round"]


@dataclass
class Round:
    """What ranks said about one generation; a new generation begins without any."""

    settled: dict[int, Settled] = field(default_factory=dict[int, Settled])
    left: set[int] = field(default_factory=set[int])
    """Ranks that have left whatever they were in for this generation."""
    joined: dict[int, Joined] = field(default_factory=dict[int, Joined])
    fenced: dict[int, str] = field(default_factory=dict[int, str])
    """Why, by rank."""
    finished: set[int] = field(default_factory=set[int])
    asked_to_yield: int | None = None
    """The rank that was asked to bring it into the next vote."""
    trouble_since_s: float | None = None
    is_closed: bool = False
    """Everybody was told to leave the generation before; without it, members left by agreement."""
    awaits: bool = False
    """Nobody goes on before the members that are being started are back."""


class Core:
    """The state of one job, and the ways in which the coordinator acts."""

    def __init__(self, job: JobConfig, now_s: float) -> None:
        self.job = job
        self.timing = Timing.from_detect_within(job.job.detect_within_s)
        self.now_s = now_s
        self.phase = Phase.STARTING
        self.phase_since_s = now_s
        self.reason = ""
        """Why the job ended, once it has."""
        self.alive: set[int] = set(range(job.parallel.world))
        self.lost: list[int] = []
        self.revived: set[int] = set()
        """Members that were started again and have not joined a generation since."""
        self.returned: set[int] = set()
        """Lost ranks whose new executor is ready, and which no plan counts on yet."""
        self.newcomers: set[int] = set()
        """Ranks that the opening generation has and the one before it had not."""
        self.executors: dict[int, int] = {}
        """Process number of the newest executor of each rank, as far as it was said."""
        self.told_lost: set[int] = set()
        """Ranks whose end an earlier coordinator told: to this one it is no news, nor their loss
        where no plan without them was decided on."""
        self.ready: dict[int, Ready] = {}
        self.has_resumed = False
        """Another coordinator led before; it may know steps that this one does not."""
        self.generation = 0
        self.base = 0
        """The generation whose layout all survivors hold; 0: what `start` says."""
        self.start = Commit(version=0, updates=0, record=None)
        """What the job began with: untrained parameters, or a saved version."""
        self.base_plan: VerifiedPlan | None = None
        self.plan: VerifiedPlan | None = None
        self.perhaps_base: tuple[int, VerifiedPlan] | None = None
        """Where another coordinator may have said go, which dropped the layout of `base`."""
        self.round = Round()
        self.records: list[StepRecord] = []
        self.begun: tuple[int, int] = (0, 0)
        """The newest generation that was proposed, and the version that it begins with."""
        self.last_step_s = now_s
        self.longest_step_s = 0.0
        self.chunk_times = ChunkTimes()
        self.book = IncidentBook()
        self._actions: list[Action] = []

    @property
    def settle_bound_s(self) -> float:
        """How long a survivor may take to leave its generation."""
        return self.timing.settle_bound_s(self.longest_step_s if self.records else None)

    @property
    def bases(self) -> dict[int, VerifiedPlan | None]:
        """Layouts that all survivors may hold, with their plans; the older one first."""
        bases = {self.base: self.base_plan}
        return bases if self.perhaps_base is None else bases | dict((self.perhaps_base,))

    @property
    def goes_back(self) -> bool:
        """Whether all begin with a saved version, whatever they hold."""
        return self.base == 0 and bool(self.start.saved) and self.perhaps_base is None

    def settle_on(self, base: int, plan: VerifiedPlan | None) -> None:
        """All hold the layout of generation `base`, whose plan is `plan`."""
        self.base, self.base_plan, self.perhaps_base = base, plan, None

    def opens(self, generation: int) -> bool:
        """Whether `generation` is the one that opens now."""
        return self.phase is Phase.OPENING and generation == self.generation

    def enter(self, phase: Phase) -> None:
        """Begin a phase now."""
        self.phase = phase
        self.phase_since_s = self.now_s

    def stop(self, reason: str, exit_code: int) -> None:
        """End the job: every supervisor is told, also those whose executor is gone."""
        self.enter(Phase.STOPPING)
        self.reason = reason
        # Monitors first: a rank that has ended, while no monitor knows why, would count as lost.
        self.do(End(exit_code, reason))
        for rank in range(self.job.parallel.world):
            self.send(rank, Stop(reason=reason, exit_code=exit_code))
        self.log("stop", reason=reason, exit_code=exit_code)

    def ask_to_yield(self) -> None:
        """All leave the running generation after the same step; one brings the wish to the vote."""
        if self.round.asked_to_yield is None:
            assert self.plan is not None
            self.round.asked_to_yield = min(self.plan.plan.active_ranks)
        request = Request(generation=self.generation, what="yield")
        self.send(self.round.asked_to_yield, request)

    def is_history(self, step: int, generation: int) -> bool:
        """Whether a step that `generation` committed is still one: not where all went back."""
        newest, version = self.begun
        return generation >= newest or step < version

    def go_back(self, start: Commit) -> None:
        """All begin again with `start`, a saved version: later steps are void."""
        self.settle_on(0, None)
        self.start = start
        if start.version < len(self.records):
            del self.records[start.version :]
            self.do(StepsTakenBack(start.version))
        missing = range(len(self.records), start.version)
        self.records += [StepRecord.empty(step) for step in missing]

    def keep_record(self, record: StepRecord) -> bool:
        """Of a committed step; whether it is news.

        Steps that nobody told this coordinator of, since another one led then, say nothing.
        """
        if record.step < len(self.records):
            return False
        self.records += [StepRecord.empty(step) for step in range(len(self.records), record.step)]
        self.records.append(record)
        return True

    # --- actions

    def do(self, action: Action) -> None:
        """Have `action` done."""
        self._actions.append(action)

    def send(self, rank: int, message: Message) -> None:
        """To the supervisor of `rank`, which relays it."""
        self.do(Send(rank, message))

    def is_of_newest(self, rank: int, pid: int) -> bool:
        """Whether `pid` is the executor of `rank` that started last; 0 may be any."""
        return pid == 0 or self.executors.get(rank, pid) == pid

    def respawn(self, rank: int) -> Respawn:
        """The order to start an executor in the place of the one that `rank` has or had."""
        return Respawn(after=self.executors.get(rank, 0))

    def fence(self, rank: int, reason: str) -> Fence:
        """The order to kill the executor that `rank` has now, and none that follows it."""
        return Fence(reason=reason, pid=self.executors.get(rank, 0))

    def broadcast(self, message: Message) -> None:
        """To all ranks that are alive."""
        for rank in sorted(self.alive):
            self.send(rank, message)

    def log(self, kind: str, **fields: object) -> None:
        """An event of the run."""
        self.do(Log(kind, fields))

    def say(self, line: str) -> None:
        """A line for the operator."""
        self.do(Say(line))

    def take(self) -> list[Action]:
        """All that is to be done since it was last asked."""
        actions, self._actions = self._actions, []
        return actions
