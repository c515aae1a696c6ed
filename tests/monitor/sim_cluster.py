"""A whole simulated job: nodes, ranks, faults, and what must hold at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from coordinator_cases import STORE, CachedPlanner, job_of
from sim_disk import VersionDisk
from sim_nodes import CoordinatorProcess, Node
from sim_ranks import Executor, Supervisor
from sim_state import plan_of
from sim_time import Timeline
from sim_wires import Net

from resihp.monitor.actions import End, Log, PlanMade
from resihp.monitor.coordinator import Phase
from resihp.monitor.quorum.acceptor import Kept
from resihp.wire.messages import Deploy, StepRecord
from resihp.wire.timing import Timing

NUM_STEPS = 4
RARE_EVENTS = (
    "adopted",
    "evict",
    "not_adopted",
    "not_heard",
    "reopen",
    "resumed",
    "stood_still",
)


class Cluster:
    """Everything of one job. `run` it; AssertionError where an invariant breaks."""

    def __init__(
        self, seed: int, *, num_nodes: int, degrees: tuple[int, int, int], saves: bool = False
    ) -> None:
        """`saves`: there is a disk for versions."""
        tp, pp, dp = degrees
        self.saves = saves
        self.disk = VersionDisk()
        self.terminated_s = float("inf")
        """When all nodes were told that the job is to end."""
        self.seed = seed
        self.time = Timeline(seed)
        self.random = self.time.random
        self.net = Net(self.time)
        self.job = job_of(tp, pp, dp, steps=NUM_STEPS)
        self.num_steps = NUM_STEPS
        self.timing = Timing.from_detect_within(self.job.job.detect_within_s)
        self.planner = CachedPlanner(self.job)
        self.address = STORE
        self.rarities: Counter[str] = Counter()
        self.step_scale = self.random.choice([1.0, 20.0, 100.0])
        """How long an iteration computes."""
        self.shares_disk = self.random.random() < 0.5
        """Whether all nodes see one run directory."""
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
        self._holders: dict[int, list[Executor]] = {}
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
            first = node.number * self._per_node
            for rank in range(first, first + self._per_node):
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

    @property
    def supervisors(self) -> list[Supervisor]:
        return [each for node in self.nodes for each in node.supervisors.values()]

    @property
    def coordinators(self) -> list[CoordinatorProcess]:
        """Those that live."""
        children = [node.monitor.coordinator for node in self.nodes if node.monitor is not None]
        return [child for child in children if child is not None and not child.dead]

    def known_records(self, node: Node) -> list[StepRecord]:
        places = self.nodes if self.shares_disk else [node]
        known = {step: record for each in places for step, record in each.records.items()}
        return [known[step] for step in sorted(known)]

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
        receiver = next(each for each in self.supervisors if each.rank == rank).executor
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
            self._holders[record.step] = []
        self._holders.setdefault(record.step, []).append(executor)

    def check_redone(self, known: StepRecord, record: StepRecord) -> None:
        """A step is made again in a later generation: nobody of that has the first one."""
        what = f"step {record.step} of generation {known.num_tokens}"
        reporter = self._reported.get(record.step)
        if reporter is not None:
            # What a coordinator says that is cut off, or cut off soon, those who go on cannot know.
            newest = self._leads[max(self._leads)]
            assert reporter != newest, f"{what} was reported, and is made again"
            self.rarity("report of a replaced coordinator")
        for holder in self._holders[record.step]:
            is_out = holder.dead or not self.belongs(holder, record.num_tokens)
            assert is_out, f"{what} is in the state of rank {holder.rank}"
        self.rarity("step redone that only lost ranks had")

    def belongs(self, executor: Executor, generation: int) -> bool:
        """Whether its rank is in the plan of `generation`."""
        plan = plan_of(self._acted[generation])
        return executor.rank in {*plan.active_ranks, *plan.standby}

    def reported(self, by: CoordinatorProcess, record: StepRecord, generation: int) -> None:
        """A coordinator says that a step is committed."""
        known = self._steps.setdefault(record.step, record)
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

    def told(self, process: CoordinatorProcess, order: PlanMade | Log) -> None:
        """What a coordinator writes into the run's directory."""
        if isinstance(order, PlanMade):
            known = self._told.setdefault(order.generation, order.text)
            assert known == order.text, f"two plans of generation {order.generation} decided"
        elif order.kind in RARE_EVENTS:
            self.rarity(order.kind)
            is_new = process.born_s > self.terminated_s
            assert not is_new or order.kind != "adopted", "it was to end the job, and adopts"

    def coordinator_ends(self, process: CoordinatorProcess, end: End) -> None:
        self.ends.append((process, end))

    # --- the run

    def run(self, limit_s: float) -> list[tuple[int, str]]:
        """Until nothing runs on any node; (exit code, reason) of those that were not lost."""
        self.time.run(lambda: all(node.is_over for node in self.nodes), limit_s)
        ends = [node.ended for node in self.nodes if node.ended is not None]
        self.check_end([(end.exit_code, end.reason) for end in ends])
        return [(end.exit_code, end.reason) for end in ends]

    def check_end(self, ends: list[tuple[int, str]]) -> None:
        codes = {code for code, _ in ends}
        assert len(codes - {1}) <= 1, f"nodes end differently: {ends}"
        if 0 in codes:
            assert sorted(self._steps) == list(range(self.num_steps)), "steps are missing"
            executors = [each.executor for each in self.supervisors]
            newest = max(each.layout for each in executors if each.version == self.num_steps)
            done = [each for each in executors if each.layout == newest]
            histories = {
                each.history for each in done if each.version == self.num_steps and each.holds
            }
            assert len(histories) == 1, "members ended with different states"
        if 143 in codes:
            self.check_saved(next(reason for code, reason in ends if code == 143))
        if 4 in codes:
            is_left = not any("no rank is left" in reason for _, reason in ends)
            assert self.planner.refusals or not is_left, "no plan, and none was refused"

    def check_saved(self, reason: str) -> None:
        """Nothing that was told to be complete is lost, and nothing else is said."""
        if not self._reported:
            self.rarity("ended before the first step")
            return
        assert "is not saved" not in reason, reason
        assert self.disk.versions, reason
        newest = self.disk.versions[0]
        assert f"newest saved: {newest.name}" in reason
        assert newest.step == max(self._reported, default=-1) + 1, "another step was saved"
