"""The coordinators of the simulated cluster: what `monitor.server` is around the real decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator_cases import SECRET
from sim_messages import (
    Ended,
    EvictRank,
    FromRank,
    NodeBeat,
    RankGone,
    ToRank,
)
from sim_time import Process, Work
from sim_wires import Wire

from resihp.monitor.actions import (
    CompleteVersion,
    DropVersion,
    Evict,
    Log,
    PlanMade,
    Send,
    StepCommitted,
    StepsTakenBack,
)
from resihp.monitor.actions import End as JobEnd
from resihp.monitor.checkpoints import SavePlace
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.helm import Helm, Order
from resihp.monitor.quorum.leadership import Leadership
from resihp.monitor.quorum.outcomes import Deposed, ToNode
from resihp.wire.messages import Fence, Hello, Message, Resend, Resent, StepRecord
from resihp.wire.nodes import StopAsked
from resihp.wire.quorum import Accepted, Entry, Promise, Superseded

if TYPE_CHECKING:
    from sim_nodes import Node

RETRY_S = 0.1


class CoordinatorProcess(Process):
    """The coordinator of a job, on one node; dials the monitors of all."""

    def __init__(self, node: Node, first_term: int) -> None:
        super().__init__(node.time, node)
        self.node = node
        cluster = self.cluster = node.cluster
        cluster.num_coordinators += 1
        self.name = f"coordinator {cluster.num_coordinators}"
        self.wires: dict[int, Wire] = {}
        self.helm: Helm | None = None
        self.here: set[int] = set()
        """Ranks that have said again what may have been missed."""
        self.known: set[str] = set()
        """Versions that it must know: complete when it won the lead, or completed by itself."""
        self.born_s = self.time.now_s
        self._disk_s = 0.0
        self.later(self.time.random.uniform(0.1, 1.0), lambda: self.begin(first_term))

    def begin(self, first_term: int) -> None:
        cluster, now_s = self.cluster, self.time.now_s
        nodes = range(len(cluster.nodes))
        place = None
        if cluster.traits.saves:
            place = SavePlace("disk", "sim", tuple(cluster.disk.listed()), ())
        coordinator = Coordinator(cluster.job, cluster.planner, SECRET, now_s, place)
        lead = Leadership(nodes, self.node.number, self.name, first_term, cluster.timing, now_s)
        ranks_of = {each.number: list(each.supervisors) for each in cluster.nodes}
        self.helm = Helm(coordinator, lead, ranks_of, self.known_records)
        for number in nodes:
            self.dial(number)
        self.every(cluster.timing.beat_s, lambda: self.steer(lambda helm, s: helm.tick(s)))

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            for wire in self.wires.values():
                wire.hang_up(self)

    def known_records(self, entry: Entry) -> list[StepRecord]:
        """It takes over: what others left on the disks."""
        assert self.helm is not None
        if self.cluster.traits.saves:
            self.known = set(self.cluster.disk.intact())
            self.helm.coordinator.remember_versions(self.cluster.disk.listed())
        past = self.node.run_dir
        self.helm.coordinator.remember(past.memory())
        return past.before(entry)

    # --- connections

    def dial(self, number: int) -> None:
        """Again and again, until there is a connection."""
        node, net = self.cluster.nodes[number], self.cluster.net
        here = self.node.number
        way_is_open = net.passes(here, number) and net.passes(number, here)
        if way_is_open and node.dead:
            self.steer(lambda helm, now_s: helm.refused(number, now_s))
        wire = node.dialled(self, here) if way_is_open else None
        if wire is None:
            self.later(RETRY_S, lambda: self.dial(number))
            return
        self.wires[number] = wire
        self.steer(lambda helm, now_s: helm.connected(number, now_s))

    def hung_up(self, wire: Wire) -> None:
        number = wire.node_beyond(self)
        if self.wires.get(number) is wire:
            del self.wires[number]
            self.here.difference_update(self.cluster.ranks_of(number))
            self.steer(lambda helm, now_s: helm.disconnected(number, now_s))
            self.later(RETRY_S, lambda: self.dial(number))

    def hear(self, wire: Wire, message: object) -> None:
        number = wire.node_beyond(self)
        if self.wires.get(number) is not wire:
            return
        match message:
            case NodeBeat(count, beats):
                self.steer(lambda helm, now_s: helm.beat(number, count, beats, now_s))
            case FromRank(rank, said):
                self.hear_rank(rank, said)
            case StopAsked():
                reason, code = message.reason, message.exit_code
                self.steer(lambda helm, now_s: helm.stop(reason, code, now_s))
            case RankGone(rank, _):
                self.here.discard(rank)
                self.steer(lambda helm, now_s: helm.rank_gone(rank, now_s))
            case Promise() | Superseded() | Accepted():
                self.steer(lambda helm, now_s: helm.answer(number, message, now_s))
            case Ended(code, reason, _):
                self.cluster.rarity("end learned from a monitor")
                self.steer(lambda helm, now_s: helm.over(reason, code, now_s))
            case _:
                raise AssertionError(f"unexpected {message}")

    def hear_rank(self, rank: int, said: Message) -> None:
        """Before it has said again what it said last, what it says may have gaps."""
        if self.helm is None or not self.helm.leadership.leads:
            return
        match said:
            case Resent():
                self.here.add(rank)
                if said.has_executor:
                    return
                said = Hello(pid=0, has_executor=False)
            case Hello():
                pass
            case _ if rank not in self.here:
                return
            case _:
                pass
        self.steer(lambda helm, now_s: helm.from_rank(rank, said, now_s))

    # --- what it does

    @property
    def leads(self) -> bool:
        return self.helm is not None and self.helm.leadership.leads

    def steer(self, decide: Callable[[Helm, float], list[Order]]) -> None:
        if self.dead:
            return
        assert self.helm is not None
        orders = decide(self.helm, self.time.now_s)
        self.cluster.watch_coordinator(self)
        for order in orders:
            self.carry_out(order)

    def carry_out(self, order: Order) -> None:
        if self.dead:
            return
        if not isinstance(order, ToNode | Deposed):
            self.cluster.acted(self, order)
        match order:
            case ToNode(number, message):
                if number in self.wires:
                    self.wires[number].send(self, message)
            case Send(rank, message):
                if isinstance(message, Fence):
                    self.cluster.on_fence(rank)
                if isinstance(message, Resend):
                    self.here.discard(rank)
                self.to_node_of(rank, ToRank(rank, message))
            case Evict(rank):
                self.to_node_of(rank, EvictRank(rank))
            case Deposed(_):
                self.cluster.rarity("coordinator deposed")
                self.die()
            case JobEnd(exit_code, reason):
                assert self.helm is not None
                ended = Ended(exit_code, reason, self.helm.was_over)
                for wire in self.wires.values():
                    wire.send(self, ended)
                self.cluster.coordinator_ends(self, order)
                self.later(2 * self.cluster.timing.grace_s, self.die)
            case StepCommitted(record, generation):
                self.node.run_dir.records[record.step] = record
                self.cluster.reported(self, record, generation)
            case StepsTakenBack(version):
                self.node.run_dir.take_back(version)
                self.cluster.taken_back(self, version)
            case CompleteVersion():
                self.on_disk(lambda: self.complete(order))
            case DropVersion(name):
                self.on_disk(lambda: self.cluster.disk.drop(name))
            case Log():
                self.node.run_dir.event(order, self.time.now_s)
                self.cluster.told(self, order)
            case PlanMade():
                self.cluster.decides(self, order)
            case _:
                pass

    def on_disk(self, work: Work) -> None:
        """On a thread, one thing after the other."""
        self._disk_s = max(self._disk_s, self.time.now_s + self.time.delay(2.0))
        self.time.at(self._disk_s, lambda: self.do(work))

    def complete(self, order: CompleteVersion) -> None:
        """What came of it is heard a little later."""
        disk, keep = self.cluster.disk, self.cluster.job.checkpoint.keep
        trouble = disk.complete(order.name, order.manifest)
        pruned: list[str] = []
        if trouble:
            disk.drop(order.name)
        else:
            pruned = disk.prune(keep, order.spared, order.name)
        self.soon(lambda: self.completed(order.name, trouble, pruned))

    def completed(self, name: str, trouble: str, pruned: list[str]) -> None:
        if not trouble:
            self.known.add(name)
        self.steer(lambda helm, now_s: helm.completed(name, trouble, pruned, now_s))

    def to_node_of(self, rank: int, message: object) -> None:
        number = self.cluster.node_of(rank)
        if number in self.wires:
            self.wires[number].send(self, message)
