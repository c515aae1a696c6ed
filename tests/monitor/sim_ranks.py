"""Executors of the simulated cluster.

An iteration is a vote: every member tells all others that its gradients are complete and what it
was asked to bring, and a member that heard that of all applies the step, each at its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from sim_memory import History, Part
from sim_state import SimState, plan_of, record_for
from sim_time import Process, Work

from resihp.checkpoint.versions import version_name
from resihp.ir.model import Plan, Restore
from resihp.wire.messages import (
    Beat,
    Close,
    Deploy,
    Finished,
    Go,
    Joined,
    Message,
    PartSaved,
    Request,
    Save,
    SaveAt,
    SaveFailed,
    Settled,
    StepDone,
    StepRecord,
    StoreAt,
    StoreOpened,
    Trouble,
    VersionRefused,
)

if TYPE_CHECKING:
    from sim_cluster import Cluster
    from sim_supervisors import Supervisor


class Executor(SimState, Process):
    """One rank's executor, with the transaction of the real one."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        super().__init__(cluster.time, supervisor.host)
        self.cluster = cluster
        self.supervisor = supervisor
        self.rank = supervisor.rank
        if cluster.traits.snapshots:
            self.memory = cluster.nodes[supervisor.node].memory
        self.epoch = 0
        """Counts generations entered and left: what was begun before is void."""
        self.told = 0
        """The newest generation that it was told of."""
        self.deploy: Deploy | None = None
        self.has_store = self.is_going = self.is_broken = False
        self.is_reaped = False
        """Its end was told."""
        self.is_saving = False
        """A part of a version is being written, or the last one is."""
        self.writes_since_s: float | None = None
        self.is_asked = False
        """It is to bring a wish to yield into its next vote."""
        self.heard: dict[int, dict[int, bool]] = {}
        """Per step, whose gradients are complete, and whether they wish to yield."""

    @property
    def plan(self) -> Plan:
        """Of the generation that it is in."""
        assert self.deploy is not None
        return plan_of(self.deploy.plan)

    @property
    def active(self) -> tuple[int, ...]:
        """Members of the generation that it is in."""
        return self.plan.active_ranks

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
        """Another executor of our generation does something when our message arrives.

        It may not get there any more where we have left meanwhile.
        """
        number = self.deploy.generation if self.deploy is not None else -1

        def arrives(other: Executor) -> None:
            if not other.is_in(number):
                return
            has_left = not self.dead and not self.is_in(number)
            if has_left and self.cluster.random.random() < 0.7:
                self.cluster.rarity("message of a rank that had left")
                other.lost_peer(number)
            else:
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
            case Request() if self.is_in(message.generation):
                assert message.what == "yield"
                self.is_asked = True
            case Save() if message.generation == self.told and self.deploy is None:
                self.save(message)
            case Go() if self.is_in(message.generation) and not self.is_going:
                self.in_epoch(self.go, 0.1)
            case _:
                pass

    def is_in(self, generation: int) -> bool:
        return self.deploy is not None and self.deploy.generation == generation

    def leave(self) -> None:
        self.epoch += 1
        self.deploy = None
        self.has_store = self.is_going = self.is_broken = self.is_saving = False
        self.heard.clear()

    def settle(self, generation: int) -> None:
        self.finish_snapshot()
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
                snapshots=self.memory.sealed() if self.memory is not None else (),
            )
        )

    def open(self, deploy: Deploy) -> None:
        self.epoch += 1
        self.deploy, self.told, self.is_asked = deploy, deploy.generation, False
        if self.rank in self.plan.returned or deploy.commit.saved:
            self.forget()
        if self.adopt(deploy.base, deploy.commit):
            self.cluster.rarity("rolled forward")
        self.cluster.begins(self, deploy)
        if deploy.store_rank == self.rank:
            opened = StoreOpened(generation=deploy.generation, address=self.cluster.address)
            self.in_epoch(lambda: self.say(opened))
        if self.rank not in self.active:
            self.in_epoch(lambda: self.join(self.history))

    # --- how it gets to its state

    def reach(self) -> None:
        """The store is known: keep our state, begin or load, or ask a holder."""
        assert self.deploy is not None
        base, commit = self.deploy.base, self.deploy.commit
        if self.rank not in self.active:
            return
        if self.holds:
            self.in_epoch(lambda: self.join(self.history), 2.0)
        elif base == 0 and commit.saved:
            self.in_epoch(lambda: self.load(commit.saved), 2.0)
        elif base == 0:
            self.in_epoch(lambda: self.join(()), 2.0)
        else:
            for rank in self.deploy.peers:
                self.tell(rank, lambda other: other.give(self))

    def load(self, name: str) -> None:
        assert self.deploy is not None
        history = self.cluster.disk.load(name)
        if history is None:
            number = self.deploy.generation
            self.say(VersionRefused(generation=number, name=name, why=f"{name} is damaged"))
            return
        self.cluster.begins_with(self.deploy, history)
        self.join(history)

    def give(self, asker: Executor) -> None:
        """Our state, if we have one of the layout that everybody comes from, or can read one."""
        if self.is_going:
            return  # it was late, and had it of another
        history = self.given()
        if history is not None:
            self.tell(asker.rank, lambda other: other.take(history))

    def given(self) -> History | None:
        """What we hold of the layout before, or are to read for others."""
        assert self.deploy is not None
        if self.holds and self.layout == self.deploy.base:
            return self.history
        return next((history for _, history in self.restored()), None)

    def restored(self) -> list[tuple[int, History]]:
        """What we are to read out of snapshots, with the ranks that held it."""
        deploy, memory = self.deploy, self.memory
        assert deploy is not None
        found: list[tuple[int, History]] = []
        for line in self.plan.reconfigure:
            if isinstance(line, Restore) and line.giver == self.rank:
                assert memory is not None, "a snapshot where there are none"
                snapshot = memory.of(line.source).get((deploy.base, deploy.commit.version))
                assert snapshot is not None, f"no such snapshot of rank {line.source}"
                found.append((line.source, snapshot.history))
        return found

    def take(self, history: History) -> None:
        if self.pending is None and not self.is_going:  # the first that comes
            self.join(history, moved_bytes=1)

    def join(self, history: History, *, moved_bytes: int = 0) -> None:
        assert self.deploy is not None
        number = self.deploy.generation
        member = self.rank in self.active
        self.history = history
        self.pending = (number, member)
        if member:
            self.secure(number)
        hashes = {"state": repr(history)} if member else {}
        self.say(Joined(generation=number, hashes=hashes, moved_bytes=moved_bytes))

    def go(self) -> None:
        if self.is_going:
            return
        self.switch()
        self.is_going = True
        if self.holds:
            if self.memory is not None:
                self.memory.remove_all_but(self.active)
            self.in_epoch(self.contribute)

    # --- an iteration

    def contribute(self) -> None:
        assert self.deploy is not None
        if self.is_broken:
            return  # it waits for a verdict
        if self.version == self.cluster.num_steps:
            if self.is_saving:
                self.in_epoch(self.contribute, 2.0)
            else:
                self.say(Finished(generation=self.deploy.generation))
            return
        step = self.reduced = self.version
        is_asked = self.is_asked
        self.finish_snapshot()
        self.cluster.on_vote()
        for rank in self.active:
            if rank == self.rank:
                self.hear_vote(step, rank, is_asked)
            else:
                self.tell(rank, lambda other: other.hear_vote(step, self.rank, is_asked))

    def hear_vote(self, step: int, rank: int, is_asked: bool) -> None:
        assert self.deploy is not None
        votes = self.heard.setdefault(step, {})
        votes[rank] = is_asked
        if votes.keys() == set(self.active) and self.version == step and not self.is_broken:
            number = self.deploy.generation
            # All members agree on it.
            after = (*self.history, (step, number))
            record = record_for(self.history, step, number, skipped=hash((after, 0)) % 5 == 0)
            record = msgspec.structs.replace(
                record,
                duration_s=self.cluster.step_s,
                snapshot=hash((after, 1)) % self.cluster.snapshot_every == 0,
            )
            ends_here = any(votes.values())
            self.in_epoch(lambda: self.see_vote(record, ends_here), 2.0)

    def see_vote(self, record: StepRecord, ends_here: bool) -> None:
        self.vote(record)
        if ends_here:
            self.is_asked = False
        self.in_epoch(lambda: self.commit(ends_here), 0.5)

    def commit(self, ends_here: bool) -> None:
        assert self.deploy is not None
        assert self.record is not None
        self.apply()
        self.say(StepDone(generation=self.deploy.generation, record=self.record))
        self.save_if_due()
        if ends_here and self.version < self.cluster.num_steps:
            self.leave_by_agreement()
        else:
            self.in_epoch(self.contribute, self.cluster.step_scale)

    def leave_by_agreement(self) -> None:
        """All yield here: settle for the next generation without being told."""
        self.cluster.rarity("yielded")
        following = self.told + 1
        self.leave()
        self.told = following
        self.in_epoch(lambda: self.settle(following))

    def apply(self) -> None:
        super().apply()
        assert self.record is not None
        self.cluster.applied(self, self.record)
        writing = self.writing
        if writing is not None:  # its thread is done at last, if nobody waited for it before
            self.soon(lambda: self.writing is writing and self.finish_snapshot(), 2.0)

    def lost_peer(self, number: int) -> None:
        """A connection to another executor of generation `number` broke."""
        if self.is_in(number) and not self.is_broken:
            self.is_broken = True
            self.say(Trouble(generation=number, what="a peer is gone"))

    # --- saved versions

    def save_if_due(self) -> None:
        """At the end of an iteration: begin to write a part, unless one is still being written."""
        deploy, every = self.deploy, self.cluster.job.checkpoint.every
        assert deploy is not None
        is_last = self.version == self.cluster.num_steps
        if deploy.save_at is None or not every or (self.version % every and not is_last):
            return
        if self.is_saving:
            name = version_name(self.version, deploy.save_at.run, deploy.generation)
            why = "the version before it is still being written"
            self.say(SaveFailed(generation=deploy.generation, name=name, why=why))
            return
        self.write_part(deploy.save_at, deploy.generation)

    def save(self, order: Save) -> None:
        """Nobody runs: write what all settled on."""
        if not self.is_saving:
            self.adopt(order.base, order.commit)
            assert self.holds, "asked to save what is not here"
            self.write_part(order.at, order.generation)

    def write_part(self, at: SaveAt, generation: int) -> None:
        name = version_name(self.version, at.run, generation)
        part = Part(self.version, self.updates, self.history)
        self.is_saving, self.writes_since_s = True, self.time.now_s

        def written() -> None:
            trouble = self.cluster.disk.write(name, self.rank, part)
            assert not trouble, trouble
            self.in_epoch(lambda: self.part_saved(name, generation, part))

        self.in_epoch(written, self.cluster.disk_scale)

    def part_saved(self, name: str, generation: int, part: Part) -> None:
        self.writes_since_s = None
        if self.deploy is not None:
            self.is_saving = False
        self.cluster.rarity("part saved")
        self.say(
            PartSaved(
                generation=generation,
                name=name,
                version=part.step,
                updates=part.updates,
                loss=None,
                part_bytes=1,
                part_sha256=part.digest,
                data_bytes=1,
                stalled_s=0.0,
                took_s=0.0,
            )
        )
