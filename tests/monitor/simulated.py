"""A small deterministic world around a real coordinator: executors, supervisors, delays, deaths.

Time is virtual. Messages of one rank arrive in order, those of different ranks in any. An
iteration is a vote: every member contributes, and sees the result once all of them did, each at
its own time, so survivors of a death may differ by one step, as real ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator_cases import STORE, CachedPlanner, Desk, exited, ready
from sim_memory import History
from sim_state import SimState, plan_of, record_for
from sim_time import Timeline, Work

from resihp.config import JobConfig
from resihp.ir.kept import weights_run_at
from resihp.ir.model import Plan
from resihp.ir.placement import placement_of
from resihp.monitor.actions import Action, Answer, End, Evict, PlanMade, Send, StepCommitted
from resihp.monitor.coordinator import Phase
from resihp.wire.messages import (
    Audited,
    Beat,
    Close,
    Commit,
    Deploy,
    ExecutorStarted,
    Fence,
    Finished,
    Go,
    HeldSums,
    Hello,
    Joined,
    Message,
    Request,
    Resend,
    Respawn,
    Settled,
    StepDone,
    StepRecord,
    Stop,
    StoreAt,
    StoreOpened,
)

Sums = dict[int, list[frozenset[int]]]
TICK_S = 0.5


@dataclass
class Generation:
    """What the members of a deployed generation share."""

    plan: Plan
    steady: Plan
    """What runs after the iteration that `plan` redoes."""
    reached: set[int] = field(default_factory=set)
    """Members that know the store."""
    joined: set[int] = field(default_factory=set)
    contributed: dict[int, set[int]] = field(default_factory=dict)
    """Per step, who has its reduced gradients."""
    asked: dict[int, set[str]] = field(default_factory=dict)
    """What the vote of each step brought."""

    def at(self, step: int) -> Plan:
        """What runs in iteration `step`."""
        resume = self.plan.resume
        return self.plan if resume is not None and resume.step == step else self.steady


class Executor(SimState):
    """One rank's executor, with the transaction of the real one."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.dead = False
        self.stuck = False
        self.asked: set[str] = set()
        """What it brings into the next vote."""
        self.epoch = 0
        """Counts generations entered and left: what was begun before is void."""
        self.deploy: Deploy | None = None
        self.runs = False
        self.sums: tuple[int, Sums] = -1, {}
        """Of an iteration: by stage, the sets of micro-batches whose sums it has."""

    def later(self, work: Callable[[], None], scale: float = 1.0) -> None:
        """Do something after a while, unless the generation is over or we are dead by then."""
        epoch = self.epoch

        def due() -> None:
            if not self.dead and not self.stuck and self.epoch == epoch:
                work()

        self.world.after(self.world.delay(scale), due)

    def send(self, message: Message) -> None:
        self.world.up(self.rank, message)

    # --- what it is told

    def receive(self, message: Message) -> None:
        match message:
            case Close():
                self.stop_computing()
                self.epoch += 1
                self.deploy = None
                self.later(lambda: self.settle(message.generation))
            case Deploy():
                self.open(message)
            case Request() if self.deploy and self.deploy.generation == message.generation:
                self.asked.add(message.what)
            case StoreAt() if self.deploy and self.deploy.generation == message.generation:
                self.later(self.reach)
            case Go() if self.deploy and self.deploy.generation == message.generation:
                self.later(self.go)
            case _:
                pass

    def settle(self, generation: int) -> None:
        self.send(
            Settled(
                generation=generation,
                version=self.version,
                voted=self.voted,
                updates=self.updates,
                record=self.record,
                layouts=(self.layout,),
                noticed_s=self.world.time.now_s,
                held_step=self.sums[0],
                held_layout=self.layout,
                held=tuple(
                    HeldSums(stage=stage, sets=tuple(tuple(sorted(each)) for each in sets))
                    for stage, sets in self.sums[1].items()
                ),
            )
        )

    def stop_computing(self) -> None:
        """Of the iteration that is interrupted it did some, in whatever order, on top of what it
        kept of it."""
        if not self.runs:
            return  # what it had when it was last interrupted is still there
        self.runs = False
        kept = self.sums[1] if self.sums[0] == self.version else {}
        plan = self.world.generations[self.layout].at(self.version)
        group, size = plan.group_of(self.rank), plan.batch.microbatches
        if group is None:
            return
        found: Sums = {}
        for stage, runs in weights_run_at(plan).items():
            if placement_of(plan).pp[stage] == group.pp:
                run = [
                    home * size + number
                    for (home, number), replica in runs.items()
                    if replica == group.replica and self.world.random.random() < 0.8
                ]
                run += [number for each in kept.get(stage, ()) for number in each]
                found[stage] = self.world.parted(run)
        self.sums = self.version, found

    def keep(self, deploy: Deploy) -> Sums:
        """What it is told to keep, as `executor.held.Keep`: it has that, and in it nothing else."""
        plan = plan_of(deploy.plan)
        group = plan.group_of(self.rank)
        if group is None or plan.resume is None or not plan.resume.keep:
            return {}
        size, keep = plan.batch.microbatches, plan.resume.keep
        numbers = {home * size + number for home, number in keep}
        step, sums = self.sums
        assert plan.resume.step == deploy.commit.version, "another iteration"
        if step != plan.resume.step:
            sums = {}
        mine = {each.stage: each for each in deploy.kept if each.replica == group.replica}
        left: Sums = {}
        for stage, pp in enumerate(placement_of(plan).pp):
            told = [each for each in deploy.kept if each.stage == stage]
            runs = weights_run_at(plan)[stage]
            done = [n for each in told for n in each.microbatches]
            done += [home * size + number for home, number in runs]
            assert sorted(done) == list(range(plan.mesh.dp * size)), "not once at every stage"
            if pp == group.pp:
                left[stage] = [each for each in sums.get(stage, ()) if each <= numbers]
                has = sorted(number for each in left[stage] for number in each)
                assert has == (list(mine[stage].microbatches) if stage in mine else [])
        self.world.rarities.add("kept")
        return left

    def open(self, deploy: Deploy) -> None:
        assert self.deploy is None, "deployed into a running generation"
        self.deploy = deploy
        self.asked.clear()
        if self.rank in plan_of(deploy.plan).returned:
            self.forget()
        if self.adopt(deploy.base, deploy.commit):
            self.world.rarities.add("rolled forward")
        generation = self.world.generations.setdefault(
            deploy.generation,
            Generation(plan_of(deploy.plan), plan_of(deploy.steady_plan or deploy.plan)),
        )
        self.keep(deploy)
        if deploy.store_rank == self.rank:
            self.later(lambda: self.send(StoreOpened(generation=deploy.generation, address=STORE)))
        if self.rank not in generation.plan.active_ranks:
            self.later(lambda: self.join((), moved=False))

    def switch(self) -> None:
        super().switch()
        self.sums = -1, {}

    def adopt(self, base: int, commit: Commit) -> bool:
        is_forward = super().adopt(base, commit)
        if self.sums[0] != commit.version:
            self.sums = -1, {}
        return is_forward

    def reach(self) -> None:
        assert self.deploy is not None
        generation = self.world.generations[self.deploy.generation]
        if self.rank not in generation.plan.active_ranks:
            return
        generation.reached.add(self.rank)
        if generation.reached == set(generation.plan.active_ranks):
            for member in self.fellows():
                member.later(member.receive_state, scale=2.0)

    def fellows(self) -> list[Executor]:
        """The members of our generation that have not left it."""
        assert self.deploy is not None
        active = self.world.generations[self.deploy.generation].plan.active_ranks
        members = [self.world.executors[rank] for rank in active]
        return [m for m in members if m.deploy and m.deploy.generation == self.deploy.generation]

    def receive_state(self) -> None:
        """What it held, or what a holder of the layout before gives it."""
        assert self.deploy is not None
        base = self.deploy.base
        if self.holds or base == 0:
            self.join(self.history, moved=False)
            return
        sources = [e for e in self.world.executors if e.holds and e.layout == base and not e.dead]
        if sources:  # else they died: nothing arrives, and nobody joins
            self.join(sources[0].history, moved=True)

    def join(self, history: History, *, moved: bool) -> None:
        assert self.deploy is not None
        number = self.deploy.generation
        member = self.rank in self.world.generations[number].plan.active_ranks
        self.pending = (number, member)
        if moved:
            self.history = history
        hashes = {"state": repr(history)} if member else {}
        self.world.generations[number].joined.add(self.rank)
        self.send(Joined(generation=number, hashes=hashes, moved_bytes=1 if moved else 0))

    def go(self) -> None:
        assert self.deploy is not None
        kept = self.keep(self.deploy)
        self.switch()
        self.sums = self.version, kept
        self.runs = self.holds
        if self.holds:
            self.later(self.contribute)

    # --- an iteration

    def contribute(self) -> None:
        assert self.deploy is not None
        number = self.deploy.generation
        generation = self.world.generations[number]
        if self.version == self.world.num_steps:
            self.send(Finished(generation=number))
            return
        step = self.version
        self.reduced = step
        votes = generation.contributed.setdefault(step, set())
        votes.add(self.rank)
        generation.asked.setdefault(step, set()).update(self.asked)
        if votes == set(generation.plan.active_ranks):
            skipped = self.world.random.random() < 0.2
            record = record_for(self.history, step, number, skipped=skipped)
            for member in self.fellows():
                member.later(lambda member=member: member.see_vote(record), scale=3.0)
            self.world.on_vote()

    def see_vote(self, record: StepRecord) -> None:
        self.vote(record)
        self.later(self.commit, scale=0.5)

    def commit(self) -> None:
        assert self.deploy is not None
        assert self.record is not None
        self.apply()
        number = self.deploy.generation
        self.send(StepDone(generation=number, record=self.record))
        asked = self.world.generations[number].asked[self.record.step]
        self.asked -= asked
        if "audit" in asked:
            audited = Audited(generation=number, version=self.version, differing=(), num_shards=1)
            self.send(audited)
        if "yield" in asked and self.version < self.world.num_steps:
            self.world.rarities.add("yielded")
            self.runs = False
            self.epoch += 1
            self.deploy = None
            self.later(lambda: self.settle(number + 1))
        else:
            self.later(self.contribute)


class World:
    """All ranks of a job and the coordinator. `run` until it stops; everything is checked."""

    def __init__(self, job: JobConfig, seed: int) -> None:
        self.time = Timeline(seed)
        self.random = self.time.random
        self.planner = CachedPlanner(job)
        self.desk = Desk(job, self.planner)
        self.desk.clock = self.time.clock
        self.num_steps = job.job.steps
        self.executors = [Executor(self, rank) for rank in self.desk.world]
        self.graves: list[Executor] = []
        """Executors that others took the place of."""
        self.returns = False
        """Whether a launcher starts lost supervisors again."""
        self.generations: dict[int, Generation] = {}
        self.silent: set[int] = set()
        self.disconnected: set[int] = set()
        self.version = 0
        self.rarities: set[str] = set()
        """Which of the hard cases came up."""
        self.phases: list[Phase] = [Phase.STARTING]
        self.on_phase: Callable[[Phase], None] = lambda _: None
        self.on_vote: Callable[[], None] = lambda: None
        """A vote has all contributions, which each member sees somewhat later."""
        sluggish = 0.5 if seed % 4 == 0 else 0.0
        self._link_scale = {
            rank: 10.0 if self.random.random() < sluggish else 1.0 for rank in self.desk.world
        }
        self._up_s = dict.fromkeys(self.desk.world, 0.0)
        self._down_s = dict.fromkeys(self.desk.world, 0.0)
        self._planned: dict[int, str] = {}
        self._steps = 0
        self.wanting = 0
        """Wishes for an audit that nobody has answered."""
        self._asked_in: set[int] = set()
        """Generations that were asked for it since the last answer."""

    # --- time

    def parted(self, numbers: list[int]) -> list[frozenset[int]]:
        """`numbers` in sets of a few, as sums of a tree have them."""
        self.random.shuffle(numbers)
        sets: list[frozenset[int]] = []
        while numbers:
            size = self.random.choice((1, 1, 2, 4))
            sets.append(frozenset(numbers[:size]))
            numbers = numbers[size:]
        return sets

    def delay(self, scale: float = 1.0) -> float:
        return self.time.delay(scale)

    def after(self, seconds: float, work: Work) -> None:
        self.time.after(seconds, work)

    def _ordered(self, last_s: dict[int, float], rank: int, work: Work) -> None:
        """A message on a connection: never before the one ahead of it."""
        delay_s = self.delay(self._link_scale[rank])
        last_s[rank] = max(last_s[rank], self.time.now_s + delay_s)
        self.time.at(last_s[rank], work)

    # --- connections

    def up(self, rank: int, message: Message) -> None:
        """`rank` sends a message to the coordinator."""

        def arrives() -> None:
            if rank not in self.disconnected:
                if isinstance(message, StepDone) and message.generation < self.desk.generation:
                    self.rarities.add("late report")
                self._perform(lambda: self.desk.say(rank, message))

        self._ordered(self._up_s, rank, arrives)

    def _down(self, rank: int, message: Message) -> None:
        def arrives() -> None:
            if rank in self.disconnected or rank in self.silent:
                return
            if isinstance(message, Fence):
                self.kill(rank)
            elif isinstance(message, Respawn):
                self.respawn(rank)
            elif not isinstance(message, Stop) and not self.executors[rank].dead:
                self.executors[rank].receive(message)

        self._ordered(self._down_s, rank, arrives)

    # --- faults

    def kill(self, rank: int) -> None:
        """SIGKILL the executor; its supervisor reports it after what was on its way."""
        if not self.executors[rank].dead:
            self.executors[rank].dead = True
            self.up(rank, exited())

    def unplug(self, rank: int) -> None:
        """The supervisor dies, and with it its executor and what was on its way."""
        self.executors[rank].dead = True
        if rank not in self.disconnected:
            self.after(self.delay(), lambda: self._perform(lambda: self.desk.gone(rank)))
            self.disconnected.add(rank)
            if self.returns:
                self.after(0.5 + self.delay(20.0), lambda: self._replug(rank))

    def respawn(self, rank: int) -> None:
        """The supervisor starts a new executor, which takes a while to get ready."""
        self.kill(rank)
        self.graves.append(self.executors[rank])
        self.executors[rank] = fresh = Executor(self, rank)
        self.up(rank, ExecutorStarted(pid=len(self.graves)))
        fresh.later(lambda: self.up(rank, ready()), scale=5.0)
        self.rarities.add("respawned")

    def _replug(self, rank: int) -> None:
        """A new supervisor, which waits to be told."""
        self.disconnected.discard(rank)
        self.silent.discard(rank)
        self.up(rank, Hello(pid=1, has_executor=False))
        self._beat(rank)

    def hang(self, rank: int) -> None:
        """The executor does nothing any more, also not when told to leave."""
        self.executors[rank].stuck = True

    def silence(self, rank: int) -> None:
        """Supervisor and executor are stopped: alive for the kernel, mute for us."""
        self.silent.add(rank)
        self.executors[rank].stuck = True

    # --- an operator

    def want_audit(self) -> None:
        """An operator asks for it, and waits."""
        self.wanting += 1
        self._perform(lambda: self.desk.do(self.desk.coordinator.wish("audit", self.time.now_s)))

    # --- the run

    def run(self, limit_s: float) -> End:
        """Until the coordinator stops; AssertionError where an invariant breaks."""
        for executor in self.executors:
            self.after(self.delay(), lambda rank=executor.rank: self.up(rank, ready()))
            self.after(0.0, lambda rank=executor.rank: self._beat(rank))
        self.after(TICK_S, self._tick)
        self.time.run(lambda: self.desk.phase is Phase.STOPPING, limit_s)
        assert self.desk.end is not None
        return self.desk.end

    def _tick(self) -> None:
        self._perform(lambda: self.desk.wait(0))
        self.after(TICK_S, self._tick)

    def _beat(self, rank: int) -> None:
        if rank not in self.silent and rank not in self.disconnected:
            self.up(rank, Beat(step=0, instruction=0))
            self.after(1.0, lambda: self._beat(rank))

    def _perform(self, decide: Callable[[], None]) -> None:
        known = len(self.desk.actions)
        alive, opening = self.desk.coordinator.alive, self.desk.phase is Phase.OPENING
        decide()
        if opening and min(alive) not in self.desk.coordinator.alive:
            self.rarities.add("store host lost")
        for action in self.desk.actions[known:]:
            self._act(action)
        if self.desk.phase is not self.phases[-1]:
            self.phases.append(self.desk.phase)
            self.on_phase(self.desk.phase)

    def _act(self, action: Action) -> None:
        match action:
            case Send(rank, message):
                self._check(rank, message)
                self._down(rank, message)
            case Evict(rank):
                self.silent.discard(rank)
                self.unplug(rank)
            case PlanMade(generation, text):
                assert generation not in self._planned, "two plans of one generation"
                assert all(generation > earlier for earlier in self._planned)
                assert text in self.planner.made, "a plan that was not verified"
                self._planned[generation] = text
            case Answer("audit", answer):
                assert self.wanting, "an answer that nobody waits for"
                self.wanting = 0
                self._asked_in.clear()
                self.rarities.add(type(answer).__name__)
            case StepCommitted(record, generation):
                assert record.step == self._steps, "a step out of order"
                assert record.num_tokens == generation, "a step of another generation"
                self._steps += 1
            case _:
                pass

    def _check(self, rank: int, message: Message) -> None:
        """What must hold for every order that the coordinator gives."""
        alive = self.desk.coordinator.alive
        match message:
            case Deploy():
                plan = plan_of(message.plan)
                assert message.plan == self._planned[message.generation]
                assert alive == set(plan.active_ranks) | set(plan.standby), "a place for the dead"
                assert message.store_rank in plan.active_ranks
                assert message.commit.version == self._steps, "a version that was not committed"
                assert message.commit.version >= self.version, "the version went back"
                self.version = message.commit.version
            case Request(generation=generation, what="audit"):
                assert self.wanting, "asked for what nobody wants"
                assert generation not in self._asked_in, "asked twice"
                if self._asked_in:
                    self.rarities.add("asked again")
                self._asked_in.add(generation)
                assert rank in alive, "an order to the dead"
            case Go():
                joined = self.generations[message.generation].joined
                assert joined >= alive, "told to go before all had joined"
            case Stop() | Resend():
                pass  # for the supervisor, whatever became of its executor
            case Respawn():
                assert rank not in alive, "a new executor for a living rank"
            case Close() if rank in self.desk.coordinator.returned:
                pass  # it was coming in, and goes back to waiting
            case _:
                assert rank in alive, "an order to the dead"
