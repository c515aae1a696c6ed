"""A whole simulated job: nodes, ranks, faults, and what must hold at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from typing import NamedTuple

import msgspec
from coordinator_cases import STORE, CachedPlanner, job_of
from sim_coordinator import CoordinatorProcess
from sim_memory import Disk, History, RunDir
from sim_nodes import Node
from sim_ranks import Executor
from sim_state import plan_of
from sim_supervisors import Supervisor
from sim_time import Timeline
from sim_wires import Net

from resihp.config import CheckpointConfig, JobConfig, RejoinConfig, StateConfig
from resihp.ir.model import Plan
from resihp.ir.reshard import chunks_of_member, layers_of
from resihp.monitor.actions import End, Log, PlanMade
from resihp.monitor.coordinator import Phase
from resihp.monitor.quorum.acceptor import Kept
from resihp.wire.messages import Deploy, StepRecord
from resihp.wire.timing import Timing

RARE_EVENTS = {
    "adopted",
    "evict",
    "goes_back",
    "not_adopted",
    "not_heard",
    "rejoined",
    "reopen",
    "resumed",
    "saved",
    "stood_still",
    "taken_back",
    "version_refused",
    "waits_for_restarts",
}
"""Events of the real coordinator that are counted."""


class Traits(NamedTuple):
    """What a job has beside the bare protocol."""

    num_steps: int = 4
    returns: bool = False
    """Lost ranks are started again and come back."""
    saves: bool = False
    """Versions are saved, on a disk that all nodes see."""
    snapshots: bool = False
    """Executors keep snapshots in the memory of their node."""


PLAIN = Traits()


class Cluster:
    """Everything of one job. `run` it; AssertionError where an invariant breaks."""

    def __init__(
        self,
        seed: int,
        *,
        num_nodes: int,
        degrees: tuple[int, int, int],
        traits: Traits = PLAIN,
    ) -> None:
        self.seed = seed
        self.traits = traits
        self.time = Timeline(seed)
        self.random = self.time.random
        self.net = Net(self.time)
        every = self.random.randint(1, 2)
        self.job = _job(degrees, traits, every)
        self.snapshot_every = every
        """Steps between two snapshots in the mean; all agree after which."""
        self.num_steps = traits.num_steps
        self.disk = Disk()
        self.timing = Timing.from_detect_within(self.job.job.detect_within_s)
        self.planner = CachedPlanner(self.job)
        self.address = STORE
        self.rarities: Counter[str] = Counter()
        self.step_scale = self.random.choice([1.0, 20.0, 100.0])
        """How long an iteration computes."""
        self.step_s = 0.5
        """How long an iteration is said to take."""
        if traits.returns:  # a job is not over before anybody is back, nor too short to grow
            self.step_scale, self.step_s = self.random.choice([30.0, 100.0]), 2.0
        self.disk_scale = self.step_scale * self.random.choice([0.2, 1.0, 4.0])
        """How long it takes to write a part."""
        self.shares_disk = self.random.random() < 0.5
        """Whether all nodes see one run directory, which is `run_dir` then."""
        self.run_dir = RunDir()
        self.terminated_s = inf
        """When all nodes were told that the job is to end."""
        self.has_run = False
        """Whether some generation did."""
        self.may_hang = True
        """Whether some fault makes a rank, or the way to it, silent."""
        self.num_coordinators = 0
        self._num_pids = 0
        self.on_vote: Callable[[], None] = lambda: None
        self.on_fence: Callable[[int], None] = lambda _: None
        self.on_phase: Callable[[CoordinatorProcess, Phase], None] = lambda _, __: None
        self._phases: dict[str, Phase] = {}
        self._acted: dict[int, str] = {}
        self._told: dict[int, str] = {}
        self._steps: dict[int, StepRecord] = {}
        """The history of the job: each step once."""
        self._begun: dict[int, History] = {}
        """With which history each generation begins."""
        self._num_refusals = 0
        """Of plans, when one was made last."""
        self._reported: dict[int, str] = {}
        """Which coordinator said so last, by step."""
        self._leads: dict[int, str] = {}
        self._won_s: dict[int, float] = {}
        """Since when somebody leads, by term."""
        self.ends: list[tuple[CoordinatorProcess, End]] = []
        world = self.job.parallel.world
        self._per_node = world // num_nodes
        assert self._per_node * num_nodes == world
        self.nodes: list[Node] = []
        for number in range(num_nodes):
            self.nodes.append(Node(self, number))
        for node in self.nodes:
            for rank in self.ranks_of(node.number):
                node.supervisors[rank] = Supervisor(self, node.number, rank)
        for node in self.nodes:
            node.begin()

    # --- who is where

    def new_pid(self) -> int:
        """No two executors have the same."""
        self._num_pids += 1
        return self._num_pids

    def node_of(self, rank: int) -> int:
        return rank // self._per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)

    def executor_of(self, rank: int) -> Executor:
        """The one that the rank has now."""
        return self.nodes[self.node_of(rank)].supervisors[rank].executor

    @property
    def supervisors(self) -> list[Supervisor]:
        return [each for node in self.nodes for each in node.supervisors.values()]

    @property
    def coordinators(self) -> list[CoordinatorProcess]:
        """Those that live."""
        children = [node.monitor.coordinator for node in self.nodes if node.monitor is not None]
        return [child for child in children if child is not None and not child.dead]

    def terminate(self) -> None:
        """SIGTERM to the launcher, which hands it to the owner of each node."""
        self.terminated_s = self.time.now_s
        for node in self.nodes:
            node.terminate()

    # --- between executors

    def between_executors(
        self, sender: Executor, rank: int, work: Callable[[Executor], None]
    ) -> None:
        """A message on the data plane; nobody hears it where the receiver is another by then."""
        receiver = self.executor_of(rank)
        source, target = sender.supervisor.node, self.node_of(rank)
        self.time.after(
            self.net.delay(source, target),
            lambda: self.net.arrive(source, target, receiver, lambda: work(receiver)),
        )

    def executor_died(self, executor: Executor) -> None:
        """Some of those that were connected to it notice."""
        if executor.deploy is None:
            return
        number = executor.deploy.generation
        for supervisor in self.supervisors:
            other = supervisor.executor
            if other is not executor and self.random.random() < 0.5:
                source = executor.supervisor.node
                self.time.after(
                    self.net.delay(source, supervisor.node),
                    partial(
                        self.net.arrive,
                        source,
                        supervisor.node,
                        other,
                        partial(other.lost_peer, number),
                    ),
                )

    # --- what must hold

    def rarity(self, name: str) -> None:
        self.rarities[name] += 1

    def acts(self, executor: Executor, deploy: Deploy) -> None:
        """An executor begins to act under a plan."""
        known = self._acted.setdefault(deploy.generation, deploy.plan)
        assert known == deploy.plan, f"two plans of generation {deploy.generation} acted on"
        assert deploy.plan in self.planner.made, "a plan that was not verified"
        if deploy.generation != executor.told:
            assert deploy.generation > executor.told, "an older generation acted on"
        plan = plan_of(deploy.plan)
        assert executor.rank in {*plan.active_ranks, *plan.standby}, "deployed to the dead"
        copies = sum(
            self.node_is_on(node.number) and self._has(node.kept, deploy.generation)
            for node in self.nodes
        )
        assert copies, "deployed before any journal has it"

    def begins(self, executor: Executor, deploy: Deploy) -> None:
        """An executor is at the version that all begin with: it has what others count on."""
        if deploy.base == 0:
            return
        assert deploy.previous_plan is not None
        rank, plan = executor.rank, plan_of(deploy.plan)
        was_member = rank in plan_of(deploy.previous_plan).active_ranks
        if was_member and rank not in plan.returned:
            assert executor.holds, f"rank {rank} is counted on, and holds nothing"
            self.begins_with(deploy, executor.history)
        for _, history in executor.restored():
            self.rarity("restored from a snapshot")
            self.begins_with(deploy, history)

    def begins_with(self, deploy: Deploy, history: History) -> None:
        """Some of the state that a generation begins with."""
        assert len(history) == deploy.commit.version, "a source of another version"
        known = self._begun.setdefault(deploy.generation, history)
        assert known == history, f"generation {deploy.generation} begins with two histories"

    def _has(self, kept: Kept, generation: int) -> bool:
        return kept.entry is not None and kept.entry.generation >= generation

    def node_is_on(self, number: int) -> bool:
        return number in range(len(self.nodes))

    def applied(self, executor: Executor, record: StepRecord) -> None:
        """An executor has a step. It counts unless only lost ones have it, unheard."""
        known = self._steps.setdefault(record.step, record)
        if known.num_tokens > record.num_tokens:
            # A vote that was complete arrives late, at one whom the others go on without.
            assert not self.belongs(executor, known.num_tokens), "a step of an older generation"
            self.rarity("zombie finished a step alone")
            return
        if known != record:
            self.check_redone(known, record)
            self._steps[record.step] = record

    def check_redone(self, known: StepRecord, record: StepRecord) -> None:
        """A step is made again in a later generation: nobody of that has the first one."""
        what = f"step {record.step} of generation {known.num_tokens}"
        reporter = self._reported.get(record.step)
        if reporter is not None:
            # What a coordinator says that is cut off, or cut off soon, those who go on cannot know.
            newest = self._leads[max(self._leads)]
            is_known = self.shares_disk and not self.may_hang
            assert reporter != newest and not is_known, f"{what} was reported, and is made again"
            self.rarity("report of a replaced coordinator")
        made = (record.step, known.num_tokens)
        for holder in (each.executor for each in self.supervisors):
            has_it = not holder.dead and holder.holds and made in holder.history
            is_out = not has_it or not self.belongs(holder, record.num_tokens)
            assert is_out, f"{what} is in the state of rank {holder.rank}"
        self.rarity("step redone that only lost ranks had")

    def taken_back(self, by: CoordinatorProcess, version: int) -> None:
        """A coordinator has steps done again, which is right only where a shard has no source."""
        if by.name != self._leads[max(self._leads)]:
            return
        gone = [step for step in self._reported if step >= version]
        is_needed = self.planner.refusals > self._num_refusals
        assert not gone or is_needed or not self._is_whole(by, max(gone) + 1), (
            f"steps from {version} on were taken back, and every shard of them is there"
        )
        for step in gone:
            del self._reported[step]

    def _is_whole(self, by: CoordinatorProcess, version: int) -> bool:
        """Whether those that are alive hold, or can read, all of the state at `version`."""
        assert by.helm is not None
        alive = [self.executor_of(rank) for rank in by.helm.coordinator.alive]
        alive = [executor for executor in alive if not executor.dead]
        base = max((executor.layout for executor in alive if executor.holds), default=0)
        if base == 0:
            return False  # they are all started again: the version of most of them is taken
        plan = plan_of(self._acted[base])
        sources: set[int] = set()
        for executor in alive:
            is_there = executor.version == version
            follows = executor.version + 1 == version and executor.reduced == executor.version
            if executor.holds and executor.layout == base and (is_there or follows):
                sources.add(executor.rank)
            memory = executor.memory
            if memory is not None:
                sources.update(r for r in plan.active_ranks if (base, version) in memory.of(r))
        return covers(plan, sources)

    def belongs(self, executor: Executor, generation: int) -> bool:
        """Whether its rank is in the plan of `generation`."""
        plan = plan_of(self._acted[generation])
        return executor.rank in {*plan.active_ranks, *plan.standby}

    def reported(self, by: CoordinatorProcess, record: StepRecord, generation: int) -> None:
        """A coordinator says that a step is committed."""
        known = self._steps.setdefault(record.step, record)
        if known.num_tokens < record.num_tokens:  # all saw its vote, and nobody applied it yet
            self.check_redone(known, record)
            known = self._steps[record.step] = record
        assert known == record, "reported another step than was made"
        assert record.num_tokens == generation, "reported as of another generation"
        self._reported[record.step] = by.name

    def kept(self, node: Node, kept: Kept) -> None:
        """A journal changes."""
        assert kept.promised >= node.kept.promised, "a promise was taken back"

    def watch_coordinator(self, process: CoordinatorProcess) -> None:
        """After each decision of a coordinator."""
        helm = process.helm
        assert helm is not None
        if not helm.leadership.leads:
            return
        term = helm.leadership.term
        known = self._leads.setdefault(term, process.name)
        self._won_s.setdefault(term, self.time.now_s)
        assert known == process.name, f"two coordinators lead in term {term}"
        phase = helm.coordinator.phase
        if self._phases.get(process.name) is not phase:
            self._phases[process.name] = phase
            self.on_phase(process, phase)

    def acted(self, process: CoordinatorProcess, order: object) -> None:
        """A coordinator does something: nobody else has led for longer than it may not know.

        It gives up when it hears no quorum for `silent_s`, and may stand still unnoticed for a
        lease; whoever takes over has promises that it was not told of.
        """
        assert process.helm is not None
        if process.helm.was_over:
            return  # it passes on the end, which holds whoever leads
        term, bound_s = process.helm.leadership.term, self.timing.silent_s + self.timing.lease_s
        newer_s = [won_s for newer, won_s in self._won_s.items() if newer > term]
        if newer_s:
            late_s = self.time.now_s - min(newer_s)
            assert late_s < 1.5 * bound_s, f"replaced for {late_s:.1f} s, and did {order}"

    def decides(self, process: CoordinatorProcess, made: PlanMade) -> None:
        """A coordinator writes a plan into the run's directory."""
        self._num_refusals = self.planner.refusals
        known = self._told.setdefault(made.generation, made.text)
        assert known == made.text, f"{process.name}: two plans of generation {made.generation}"

    def told(self, process: CoordinatorProcess, order: Log) -> None:
        """An event of the run."""
        if order.kind in RARE_EVENTS:
            self.rarity(order.kind)
        self.has_run = self.has_run or order.kind == "running"
        is_new = process.born_s > self.terminated_s
        assert not is_new or order.kind != "adopted", "it was to end the job, and adopts"
        match order:
            case Log("fence", {"reason": str(reason)}):
                is_mistake = reason.startswith("holds layouts")
                is_late = reason.startswith("did not leave") and not self.may_hang
                assert not is_mistake, f"fenced by mistake: {reason}"
                assert not is_late, f"fenced, and nobody hangs: {reason}"
            case Log("resumed"):
                assert process.helm is not None
                versions = process.helm.coordinator._saving.versions
                missing = process.known - {each.name for each in versions}
                assert not missing, f"{process.name} leads, and does not know of {missing}"
            case Log("goes_back", {"step": int(step)}):
                intact = self.disk.intact()
                newest = max((intact[name] for name in process.known if name in intact), default=0)
                assert step >= newest, f"back to step {step}, and step {newest} is saved"
            case _:
                pass

    def coordinator_ends(self, process: CoordinatorProcess, end: End) -> None:
        """What it says is saved is so, and is the state that it ends with."""
        self.ends.append((process, end))
        assert process.helm is not None
        if not self.traits.saves or process.helm.was_over or end.exit_code == 0:
            return
        is_signal = end.reason.startswith("stopped by")
        assert "saved" in end.reason or not is_signal, "it does not say what is saved"
        if "disk took" in end.reason and not self.may_hang:
            self.check_slow_disk(end.reason)
        if "newest saved" in end.reason and "is not saved" not in end.reason:
            step = len(process.helm.coordinator.records)
            assert step in self.disk.intact().values(), f"step {step} is lost: {end.reason}"
            self.rarity("saved at the end")

    def check_slow_disk(self, reason: str) -> None:
        """A disk is blamed where some part has been written for longer than is waited."""
        live = [each.executor for each in self.supervisors if not each.executor.dead]
        since_s = [each.writes_since_s for each in live if each.writes_since_s is not None]
        longest_s = self.time.now_s - min(since_s, default=self.time.now_s)
        assert longest_s > 0.99 * self.timing.save_s, f"after {longest_s:.1f} s: {reason}"
        self.rarity("slow disk")

    # --- the run

    def run(self, limit_s: float) -> list[tuple[int, str]]:
        """Until nothing runs on any node; (exit code, reason) of those that were not lost."""
        self.time.run(lambda: all(node.is_over for node in self.nodes), limit_s)
        ends = [node.ended for node in self.nodes if node.ended is not None]
        self.check_end([(end.exit_code, end.reason) for end in ends])
        return [(end.exit_code, end.reason) for end in ends]

    def check_end(self, ends: list[tuple[int, str]]) -> None:
        codes = {code for code, _ in ends}
        # A coordinator that is cut off, and believes the others lost, ends its own node.
        newest = self._leads[max(self._leads)] if self._leads else ""
        cut_off = {end.exit_code for process, end in self.ends if process.name != newest}
        said = codes - {1} - (cut_off if self.may_hang else set())
        assert len(said) <= 1, f"nodes end differently: {ends}"
        if 0 in codes:
            assert sorted(self._steps) == list(range(self.num_steps)), "steps are missing"
            executors = [each.executor for each in self.supervisors]
            newest = max(each.layout for each in executors if each.version == self.num_steps)
            done = [each for each in executors if each.layout == newest]
            histories = {
                each.history for each in done if each.version == self.num_steps and each.holds
            }
            assert len(histories) == 1, "members ended with different states"
            made = tuple((step, self._steps[step].num_tokens) for step in sorted(self._steps))
            assert histories == {made}, "the state at the end is not that of the steps"
        if 143 in codes and self.terminated_s < inf:
            self.check_saved(next(reason for code, reason in ends if code == 143))
        if 4 in codes:
            is_left = not any("no rank is left" in reason for _, reason in ends)
            is_left = is_left and not any("is damaged" in reason for _, reason in ends)
            assert self.planner.refusals or not is_left, "no plan, and none was refused"
            is_kept = self.traits.snapshots and self.has_run and not self.may_hang
            assert not is_kept, f"{ends}, and the memory of every node has its snapshots"

    def check_saved(self, reason: str) -> None:
        """Nothing that was told to be complete is lost, and nothing else is said."""
        if not self._reported:
            self.rarity("ended before the first step")
            return
        if self.rarities["slow disk"] and "disk took" in reason:
            return
        assert "is not saved" not in reason, reason
        newest = self.disk.listed()[0]
        assert f"newest saved: {newest.name}" in reason
        assert newest.step == max(self._reported) + 1, "another step was saved"


def _job(degrees: tuple[int, int, int], traits: Traits, every: int) -> JobConfig:
    """`every` so many steps state is kept, where it is."""
    tp, pp, dp = degrees
    job = job_of(tp, pp, dp, steps=traits.num_steps)
    if traits.returns:
        restarts = 9 if traits.snapshots else 3  # more than there are faults
        rejoin = RejoinConfig(restarts=restarts, good_iterations=1)
        job = msgspec.structs.replace(job, rejoin=rejoin)
    if traits.saves:
        saves_on = traits.returns  # else at the end only
        saving = CheckpointConfig(dir="disk", every=every + 1 if saves_on else 0, keep=every)
        job = msgspec.structs.replace(job, checkpoint=saving)
    state = StateConfig(snapshot_every="auto" if traits.snapshots else 0)
    return msgspec.structs.replace(job, state=state)


def covers(plan: Plan, ranks: Collection[int]) -> bool:
    """Whether `ranks` hold all of the state of `plan`, chunk by chunk."""
    need: set[tuple[int, int]] = set()
    have: set[tuple[int, int]] = set()
    for group in plan.groups:
        for member, rank in enumerate(group.ranks):
            chunks = chunks_of_member(member, group.tp, plan.mesh.tp)
            pieces = {(layer, chunk) for layer in layers_of(group) for chunk in chunks}
            need |= pieces
            if rank in ranks:
                have |= pieces
    return need <= have
