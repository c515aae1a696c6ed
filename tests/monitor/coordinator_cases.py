"""A coordinator with its job, a clock that moves by hand, and everything that it did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from resihp.compiler.adaptation import ANYTHING, Profile
from resihp.compiler.sources import Stored
from resihp.config import (
    BatchConfig,
    JobConfig,
    JobSection,
    ModelConfig,
    ParallelConfig,
    RejoinConfig,
)
from resihp.errors import NoFeasiblePlan
from resihp.ir.expand import expand
from resihp.ir.model import MicroBatch, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.program_bytes import decode_program
from resihp.monitor.actions import Action, Decide, End, Send
from resihp.monitor.checkpoints import SavePlace
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.planner import Grown, Planner, VerifiedPlan
from resihp.wire.address import LOOPBACK, Address
from resihp.wire.clock import ManualClock
from resihp.wire.messages import (
    Close,
    Commit,
    Deploy,
    ExecutorExited,
    Finished,
    Joined,
    Message,
    Ready,
    Settled,
    StepDone,
    StepRecord,
    StoreOpened,
)
from resihp.wire.quorum import Entry
from resihp.wire.timing import Timing

SECRET = b"s" * 32
STORE = Address(LOOPBACK, 7)
M = TypeVar("M")


def job_of(tp: int = 2, pp: int = 1, dp: int = 2, steps: int = 4) -> JobConfig:
    return JobConfig(
        job=JobSection(name="sim", steps=steps),
        model=ModelConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=64,
            vocab_size=258,
        ),
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        batch=BatchConfig(microbatches=2, tokens=64),
        rejoin=RejoinConfig(restarts=0),
    )


class CachedPlanner(Planner):
    """The real planner; asked for the same plan again, it remembers it."""

    _plans: dict[tuple[object, ...], VerifiedPlan | Exception] = {}  # noqa: RUF012
    _partly: dict[tuple[object, ...], Plan] = {}  # noqa: RUF012

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.made: set[str] = set()
        self.refusals = 0

    def initial(self) -> VerifiedPlan:
        return self._made((self._job,), super().initial)

    def after_loss(
        self, previous: VerifiedPlan, lost: Iterable[int], step: int, **stored: Any
    ) -> VerifiedPlan:
        try:
            plan = super().after_loss(previous, sorted(lost), step, **stored)
        except NoFeasiblePlan:
            self.refusals += 1
            raise
        self.made.add(plan.text)
        return plan

    def _adapted(
        self,
        previous: Plan,
        lost: Iterable[int],
        step: int,
        stored: Stored,
        profile: Profile = ANYTHING,
        returned: Collection[int] = (),
    ) -> VerifiedPlan:
        lost, returned = sorted(lost), sorted(returned)
        key = (print_plan(previous), *lost, repr((step, stored, profile, returned)))
        parent = super()._adapted
        return self._known(key, lambda: parent(previous, lost, step, stored, profile, returned))

    def _redone(
        self, plan: Plan, lost: Collection[int], keep: Collection[MicroBatch], step: int
    ) -> Plan:
        key = print_plan(plan), *sorted(lost), *keep, step
        if key not in self._partly:
            self._partly[key] = super()._redone(plan, lost, keep, step)
        return self._partly[key]

    def from_checkpoint(
        self, previous: VerifiedPlan, lost: Iterable[int], step: int
    ) -> VerifiedPlan:
        plan = super().from_checkpoint(previous, sorted(lost), step)
        self.made.add(plan.text)
        return plan

    def loading(self, plan: VerifiedPlan, step: int) -> VerifiedPlan:
        loaded = super().loading(plan, step)
        self.made.add(loaded.text)
        return loaded

    def with_returned(self, *args: Any, **kwargs: Any) -> VerifiedPlan:
        plan = super().with_returned(*args, **kwargs)
        self.made.add(plan.text)
        return plan

    def after_return(self, *args: Any, **kwargs: Any) -> Grown:
        grown = super().after_return(*args, **kwargs)
        if grown.plan is not None:
            self.made.add(grown.plan.text)
        return grown

    def _verified(self, plan: Plan, previous: Plan | None) -> VerifiedPlan:
        key = ("verified", print_plan(plan), previous and print_plan(previous))
        parent = super()._verified
        return self._known(key, lambda: parent(plan, previous))

    def _made(self, key, make) -> VerifiedPlan:
        plan = self._known(key, make)
        self.made.add(plan.text)
        return plan

    def _known(self, key, make) -> VerifiedPlan:
        if key not in self._plans:
            try:
                self._plans[key] = make()
            except Exception as error:
                self._plans[key] = error
        plan = self._plans[key]
        if isinstance(plan, Exception):
            raise plan
        return plan


def record_of(step: int, loss: float = 1.0, *, skipped: bool = False) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        skipped=skipped,
        num_tokens=256,
        samples=(step,),
        duration_s=0.5,
    )


def ready(digest: str = "d") -> Ready:
    return Ready(
        address=Address(LOOPBACK, 4000), dataset_digest=digest, num_samples=9, num_skipped_files=0
    )


def exited(code: int = -9, last_words: str = "") -> ExecutorExited:
    return ExecutorExited(code=code, last_words=last_words)


def settled(
    generation: int,
    version: int = 0,
    *,
    voted: int | None = None,
    updates: int | None = None,
    record: StepRecord | None = None,
    layouts: tuple[int, ...] | None = None,
) -> Settled:
    voted = version if voted is None else voted
    if record is None and voted > 0:
        record = record_of(voted - 1)
    return Settled(
        generation=generation,
        version=version,
        voted=voted,
        updates=version if updates is None else updates,
        record=record,
        layouts=tuple(range(generation)) if layouts is None else layouts,
        noticed_s=0.0,
    )


class Desk:
    """One coordinator; `say` and `wait` drive it, `actions` is all that it wanted done."""

    def __init__(
        self,
        job: JobConfig | None = None,
        planner: Planner | None = None,
        place: SavePlace | None = None,
    ) -> None:
        self.job = job or job_of()
        self.clock = ManualClock()
        self.coordinator = Coordinator(
            self.job, planner or CachedPlanner(self.job), SECRET, self.clock.now_s(), place
        )
        self.timing = Timing.from_detect_within(self.job.job.detect_within_s)
        self.actions: list[Action] = []
        self.decides = True
        """Whether whatever is proposed is decided at once, as where one node votes."""

    @property
    def phase(self) -> Phase:
        return self.coordinator.phase

    @property
    def generation(self) -> int:
        return self.coordinator.generation

    @property
    def world(self) -> range:
        return range(self.job.parallel.world)

    @property
    def alive(self) -> list[int]:
        return sorted(self.coordinator.alive)

    @property
    def end(self) -> End | None:
        """How the job ended; it must not end twice."""
        ends = self.all_of(End)
        assert len(ends) <= 1
        return ends[0] if ends else None

    def say(self, rank: int, message: Message) -> None:
        """`rank` says something."""
        self.do(self.coordinator.receive(rank, message, self.clock.now_s()))

    def do(self, actions: list[Action]) -> None:
        """Keep what was wanted done."""
        self.actions += actions
        for action in actions:
            if isinstance(action, Decide) and self.decides:
                self.decide(action.entry.generation)

    def decide(self, generation: int) -> None:
        """A quorum has it."""
        self.do(self.coordinator.decided(generation, self.clock.now_s()))

    def say_all(self, message: Message) -> None:
        """Every rank that is alive says the same."""
        for rank in self.alive:
            self.say(rank, message)

    def gone(self, rank: int) -> None:
        """The supervisor of `rank` is gone."""
        self.do(self.coordinator.disconnected(rank, self.clock.now_s()))

    def wait(self, seconds: float, *, beats: Message | None = None) -> None:
        """Time passes; everybody alive says `beats` at the end of it, before the tick."""
        self.clock.advance(seconds)
        if beats is not None:
            self.say_all(beats)
        self.do(self.coordinator.tick(self.clock.now_s()))

    def all_of(self, kind: type[M]) -> list[M]:
        """All actions of one kind."""
        return [action for action in self.actions if isinstance(action, kind)]

    def sent(self, kind: type[M]) -> list[tuple[int, M]]:
        """(rank, message) of all messages of one kind."""
        return [
            (action.rank, action.message)
            for action in self.all_of(Send)
            if isinstance(action.message, kind)
        ]

    def last_deploy(self) -> Deploy:
        """The newest deployment, which everybody alive got alike, but for its own program."""
        deploys = {r: m for r, m in self.sent(Deploy) if m.generation == self.generation}
        assert deploys.keys() == set(self.alive)
        alike = [msgspec.structs.replace(deploy, program=b"") for deploy in deploys.values()]
        assert all(deploy == alike[0] for deploy in alike)
        plan = parse(alike[0].plan).plan
        for rank, deploy in deploys.items():
            if rank in plan.active_ranks:
                assert decode_program(deploy.program) == expand(plan, rank)
            else:
                assert not deploy.program
        return alike[0]

    def proposed(self) -> list[Entry]:
        """All entries that were to be decided."""
        return [action.entry for action in self.all_of(Decide)]

    def entry(self, generation: int = 1, *, base: int = 0, version: int = 0) -> Entry:
        """What a coordinator may have had decided before this one came."""
        plan = CachedPlanner(self.job).initial().text
        record = record_of(version - 1) if version else None
        return Entry(
            term=1,
            generation=generation,
            electors=(0,),
            voters=(0,),
            plan=plan,
            base=base,
            base_plan=plan if base else "",
            commit=Commit(version=version, updates=version, record=record),
            alive=tuple(self.world),
            lost=(),
            cause="before",
        )

    def take_over(self, entry: Entry, records: Sequence[StepRecord] = ()) -> None:
        """This coordinator goes on from `entry`."""
        self.do(self.coordinator.resume(entry, records, self.clock.now_s()))

    # --- the usual course of things

    def get_ready(self) -> None:
        """STARTING -> OPENING."""
        self.say_all(ready())

    def join(self, hashes: dict[str, str] | None = None) -> None:
        """OPENING -> RUNNING."""
        self.say(
            self.last_deploy().store_rank, StoreOpened(generation=self.generation, address=STORE)
        )
        self.say_all(Joined(generation=self.generation, hashes=hashes or {}, moved_bytes=0))

    def run(self) -> Desk:
        """STARTING -> RUNNING."""
        self.get_ready()
        self.join()
        assert self.phase is Phase.RUNNING
        return self

    def step(self, number: int) -> None:
        """Everybody commits an iteration."""
        self.say_all(StepDone(generation=self.generation, record=record_of(number)))

    def settle(self, version: int = 0) -> None:
        """SETTLING -> OPENING (if there is a plan)."""
        self.say_all(settled(self.generation, version))

    def settle_next(self, version: int) -> None:
        """RUNNING -> OPENING: the members agreed to yield, and standby ranks are told to leave."""
        generation = self.generation + 1
        for rank in parse(self.last_deploy().plan).plan.active_ranks:
            self.say(rank, settled(generation, version))
        for rank in self.closed():
            self.say(rank, settled(generation, version))

    def finish(self) -> None:
        """RUNNING -> STOPPING."""
        self.say_all(Finished(generation=self.generation))

    def bring_to(self, phase: Phase) -> None:
        """From the start to `phase` on the shortest way; SETTLING costs rank 3."""
        if phase is Phase.RESUMING:
            self.take_over(self.entry())
            return
        self.decides = phase is not Phase.PROPOSING
        if phase is not Phase.STARTING:
            self.get_ready()
        if phase in (Phase.RUNNING, Phase.SETTLING, Phase.STOPPING):
            self.join()
        if phase is Phase.SETTLING:
            self.say(3, exited())
        if phase is Phase.STOPPING:
            self.finish()

    def closed(self) -> list[int]:
        """Ranks that were told to leave for the current generation."""
        return [r for r, m in self.sent(Close) if m.generation == self.generation]
