"""Executors and supervisors of the simulated cluster.

An iteration is a vote: every member tells all others that its gradients are complete, and a
member that heard that of all applies the step, each at its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from coordinator_cases import ready
from sim_state import History, SimState, plan_of, record_for
from sim_time import Process, Work
from sim_wires import Wire

from resihp.checkpoint.versions import version_name
from resihp.monitor.replay import Replay
from resihp.wire.messages import (
    Beat,
    Close,
    Deploy,
    ExecutorExited,
    ExecutorStarted,
    Fence,
    Finished,
    Go,
    Hello,
    Joined,
    Message,
    PartSaved,
    Resend,
    Respawn,
    Save,
    Settled,
    StepDone,
    StepRecord,
    Stop,
    StoreAt,
    StoreOpened,
    Trouble,
)

if TYPE_CHECKING:
    from sim_cluster import Cluster

RETRY_S = 0.1


class Executor(SimState, Process):
    """One rank's executor, with the transaction of the real one."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        super().__init__(cluster.time, supervisor.host)
        self.cluster = cluster
        self.supervisor = supervisor
        self.rank = supervisor.rank
        self.epoch = 0
        """Counts generations entered and left: what was begun before is void."""
        self.told = 0
        """The newest generation that it was told of."""
        self.deploy: Deploy | None = None
        self.has_store = self.is_going = self.is_broken = False
        self.saves = 0
        """The generation in which it was last told to write what it holds."""
        self.heard: dict[int, set[int]] = {}
        """Per step, whose gradients are complete."""

    @property
    def active(self) -> tuple[int, ...]:
        """Members of the generation that it is in."""
        assert self.deploy is not None
        return plan_of(self.deploy.plan).active_ranks

    def beat(self) -> Beat:
        runs = self.is_going and not self.is_broken
        return Beat(step=self.version, instruction=0, generation=self.told, runs=runs)

    def in_epoch(self, work: Work, scale: float = 1.0) -> None:
        """Do something after a while, unless the generation is over by then."""
        epoch = self.epoch
        self.soon(lambda: self.epoch == epoch and work(), scale)

    def say(self, message: Message) -> None:
        self.supervisor.do(lambda: self.supervisor.from_executor(self, message))

    def tell(self, rank: int, work: Callable[[Executor], None]) -> None:
        """Another executor of our generation does something when our message arrives."""
        number = self.deploy.generation if self.deploy is not None else None

        def arrives(other: Executor) -> None:
            if other.deploy is not None and other.deploy.generation == number:
                work(other)

        self.cluster.between_executors(self, rank, arrives)

    # --- what it is told

    def hear(self, message: Message) -> None:
        match message:
            case Close():
                self.leave()
                self.told = message.generation
                self.in_epoch(lambda: self.settle(message.generation))
            case Deploy() if message.generation >= self.told and not self.is_in(message.generation):
                assert self.deploy is None, "deployed into a running generation"
                self.cluster.acts(self, message)
                self.open(message)
            case StoreAt() if self.is_in(message.generation) and not self.has_store:
                self.has_store = True
                self.in_epoch(self.reach)
            case Go() if self.is_in(message.generation) and not self.is_going:
                self.in_epoch(self.go, 0.1)
            case Save() if message.generation == self.told and self.is_out(message.generation):
                self.save(message)
            case _:
                pass

    def is_in(self, generation: int) -> bool:
        return self.deploy is not None and self.deploy.generation == generation

    def is_out(self, generation: int) -> bool:
        """Whether it has left for `generation`, and does nothing there yet."""
        return self.deploy is None and self.saves != generation

    def save(self, order: Save) -> None:
        """A file of its own is there at once, and whole after a while, whatever happens here."""
        self.saves = order.generation
        if self.adopt(order):
            self.cluster.rarity("rolled forward")
        part = PartSaved(
            generation=order.generation,
            name=version_name(order.commit.version, order.at.run, order.generation),
            version=order.commit.version,
            updates=order.commit.updates,
            loss=None,
            part_bytes=1,
            part_sha256="0" * 64,
            data_bytes=1,
            stalled_s=0.0,
            took_s=0.0,
        )
        self.cluster.disk.begin(part.name, self.rank)
        self.in_epoch(lambda: self.say(part), 3.0)

    def leave(self) -> None:
        self.epoch += 1
        self.deploy = None
        self.saves = 0
        self.has_store = self.is_going = self.is_broken = False
        self.heard.clear()

    def settle(self, generation: int) -> None:
        layouts = (self.layout,) if self.pending is None else (self.layout, self.pending[0])
        self.say(
            Settled(
                generation=generation,
                version=self.version,
                voted=self.voted,
                updates=self.updates,
                record=self.record,
                layouts=layouts,
                noticed_s=self.time.now_s,
            )
        )

    def open(self, deploy: Deploy) -> None:
        self.epoch += 1
        self.deploy, self.told = deploy, deploy.generation
        if self.adopt(deploy):
            self.cluster.rarity("rolled forward")
        if deploy.store_rank == self.rank:
            opened = StoreOpened(generation=deploy.generation, address=self.cluster.address)
            self.in_epoch(lambda: self.say(opened))
        if self.rank not in self.active:
            self.in_epoch(lambda: self.join((), moved=False))

    def reach(self) -> None:
        """The store is known: ask a holder for the state, or keep ours."""
        assert self.deploy is not None
        if self.rank not in self.active:
            return
        base = self.deploy.base
        if self.holds or base == 0:
            self.in_epoch(lambda: self.join(self.history, moved=False), 2.0)
            return
        for rank in self.deploy.peers:
            self.tell(rank, lambda other: other.give(self))

    def give(self, asker: Executor) -> None:
        """Our state, if we have one of the layout that everybody comes from."""
        assert self.deploy is not None
        if self.holds and self.layout == self.deploy.base:
            history = self.history
            self.tell(asker.rank, lambda other: other.take(history))

    def take(self, history: History) -> None:
        if self.pending is None:
            self.join(history, moved=True)

    def join(self, history: History, *, moved: bool) -> None:
        assert self.deploy is not None
        number = self.deploy.generation
        member = self.rank in self.active
        if moved:
            self.history = history
        self.pending = (number, member)
        hashes = {"state": repr(history)} if member else {}
        self.say(Joined(generation=number, hashes=hashes, moved_bytes=int(moved)))

    def go(self) -> None:
        if self.is_going:
            return
        self.switch()
        self.is_going = True
        if self.holds:
            self.in_epoch(self.contribute)

    # --- an iteration

    def contribute(self) -> None:
        assert self.deploy is not None
        if self.is_broken:
            return  # it waits for a verdict
        if self.version == self.cluster.num_steps:
            self.say(Finished(generation=self.deploy.generation))
            return
        step = self.reduced = self.version
        self.cluster.on_vote()
        for rank in self.active:
            if rank == self.rank:
                self.hear_vote(step, rank)
            else:
                self.tell(rank, lambda other: other.hear_vote(step, self.rank))

    def hear_vote(self, step: int, rank: int) -> None:
        assert self.deploy is not None
        votes = self.heard.setdefault(step, set())
        votes.add(rank)
        if votes == set(self.active) and self.version == step and not self.is_broken:
            number = self.deploy.generation
            # All members agree on it.
            skipped = hash(((*self.history, (step, number)), 0)) % 5 == 0
            record = record_for(self.history, step, number, skipped=skipped)
            self.in_epoch(lambda: self.see_vote(record), 2.0)

    def see_vote(self, record: StepRecord) -> None:
        self.vote(record)
        self.in_epoch(self.commit, 0.5)

    def commit(self) -> None:
        assert self.deploy is not None
        assert self.record is not None
        self.apply()
        self.say(StepDone(generation=self.deploy.generation, record=self.record))
        self.in_epoch(self.contribute, self.cluster.step_scale)

    def apply(self) -> None:
        super().apply()
        assert self.record is not None
        self.cluster.applied(self, self.record)

    def lost_peer(self, number: int) -> None:
        """A connection to another executor of generation `number` broke."""
        if self.is_in(number) and not self.is_broken:
            self.is_broken = True
            self.say(Trouble(generation=number, what="a peer is gone"))


class Supervisor(Process):
    """Owns an executor, and talks to the monitor of its node, whichever that is."""

    def __init__(self, cluster: Cluster, node: int, rank: int) -> None:
        super().__init__(cluster.time, cluster.nodes[node])
        self.cluster = cluster
        self.node = node
        self.rank = rank
        self.replay = Replay()
        self.up: Wire | None = None
        self.ended: int | None = None
        """Exit code of the job, once it was told."""
        self.pid = 0
        """Of the newest executor."""
        self._down_s = 0.0
        self.executor = Executor(cluster, self)
        self.start()
        self.every(cluster.timing.beat_s, self.beat)
        self.connect()

    def start(self) -> None:
        self.pid = self.cluster.new_pid()
        executor = self.executor
        self.say(ExecutorStarted(pid=self.pid))
        executor.later(self.time.random.uniform(0.2, 2.0), lambda: executor.say(ready()))

    def beat(self) -> None:
        if not self.executor.dead and self.ended is None:
            self.send(msgspec.structs.replace(self.executor.beat(), pid=self.pid))

    def say(self, message: Message) -> None:
        """Something that must be said again to whoever asks."""
        self.replay.keep(message)
        self.send(message)

    def send(self, message: Message) -> None:
        if self.up is not None:
            self.up.send(self, message)

    def from_executor(self, executor: Executor, message: Message) -> None:
        if executor is self.executor:
            self.say(message)

    # --- the monitor

    def connect(self) -> None:
        if self.up is not None or self.ended is not None:
            return
        wire = self.cluster.nodes[self.node].accept(self)
        if wire is None:
            self.later(RETRY_S, self.connect)
            return
        self.up = wire
        wire.send(self, Hello(pid=self.rank))

    def hung_up(self, wire: Wire) -> None:
        if wire is self.up:
            self.up = None
            self.cluster.rarity("supervisor reconnects")
            self.connect()

    def hear(self, wire: Wire, message: Message) -> None:
        if wire is not self.up or self.ended is not None:
            return
        match message:
            case Stop():
                self.ended = message.exit_code
                self.executor.dead = True
            case Fence() if message.pid in (0, self.pid):
                self.kill_executor()
            case Respawn():
                self.kill_executor()
                self.executor = Executor(self.cluster, self)
                self.start()
            case Resend():
                for again in self.replay.messages(message.from_step):
                    self.send(again)
            case _:
                self.down(message)

    def down(self, message: Message) -> None:
        """To the executor, in order."""
        executor = self.executor
        self._down_s = max(self._down_s, self.time.now_s + self.time.delay(0.05))
        self.time.at(self._down_s, lambda: executor.do(lambda: executor.hear(message)))

    def kill_executor(self) -> None:
        """SIGKILL; what it said before is on its way still."""
        executor = self.executor
        if not executor.dead:
            executor.dead = True
            self.cluster.executor_died(executor)
            self.soon(lambda: self.executor_exited(executor), 0.2)

    def executor_exited(self, executor: Executor) -> None:
        if executor is self.executor and self.ended is None:
            self.say(ExecutorExited(code=-9, last_words="", pid=self.pid))

    def die(self) -> None:
        """With its executor, by the kernel."""
        if self.dead:
            return
        self.dead = True
        if not self.executor.dead:
            self.executor.dead = True
            self.cluster.executor_died(self.executor)
        if self.up is not None:
            self.up.hang_up(self)
