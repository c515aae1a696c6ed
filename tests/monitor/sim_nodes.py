"""Nodes of the simulated cluster: owners, and monitors with their journals.

All decisions are those of the real code; here are only the processes, sockets and disks around.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_coordinator import CoordinatorProcess
from sim_memory import Memory, RunDir
from sim_messages import (
    Ended,
    EvictRank,
    FromRank,
    NodeBeat,
    RankGone,
    ToRank,
    kind_of,
)
from sim_supervisors import Supervisor
from sim_time import Process
from sim_wires import End, Wire

from resihp.monitor.node.roster import Roster
from resihp.monitor.quorum.acceptor import Kept, answer_lead, answer_propose
from resihp.monitor.quorum.watch import Watch
from resihp.wire.messages import Beat, Stop
from resihp.wire.nodes import StopAsked
from resihp.wire.quorum import Accepted, Lead, Leads, Promise, Propose, Superseded

if TYPE_CHECKING:
    from sim_cluster import Cluster


class Node(Process):
    """A machine: the owner with the listening socket, the disk, and all processes on it."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(cluster.time)
        self.cluster = cluster
        self.number = number
        self.kept = Kept()
        """The journal: survives every process, not the machine."""
        self.run_dir = cluster.run_dir if cluster.shares_disk else RunDir()
        self.memory = Memory()
        """Shared by its processes, which it outlives."""
        self.stop_asked: StopAsked | None = None
        """In the note that monitors leave each other."""
        self.supervisors: dict[int, Supervisor] = {}
        self.num_monitors = 0
        self.ended: Ended | None = None
        self.monitor: Monitor | None = None

    def begin(self) -> None:
        self.start_monitor()
        self.every(self.cluster.timing.beat_s, self.keep)

    def start_monitor(self) -> None:
        self.num_monitors += 1
        self.monitor = Monitor(self)

    def keep(self) -> None:
        """Another monitor where it is dead, or stopped for too long."""
        monitor = self.monitor
        assert monitor is not None
        if monitor.dead and self.ended is None:
            self.start_monitor()
            self.cluster.rarity("monitor restarted")
        elif monitor._stopped:
            self.later(self.cluster.timing.stopped_s, lambda: monitor._stopped and monitor.die())
        if self.cluster.traits.returns and self.ended is None:
            for rank, supervisor in self.supervisors.items():
                if supervisor.dead:
                    self.cluster.rarity("supervisor restarted")
                    self.supervisors[rank] = Supervisor(
                        self.cluster, self.number, rank, was_restarted=True
                    )

    def terminate(self) -> None:
        """The job is to end: its owner hears it, and each of its monitors."""
        self.stop_asked = StopAsked(reason="stopped by SIGTERM", exit_code=143)
        if self.monitor is not None:
            self.monitor.do(self.monitor.ask_stop)

    def accept(self, peer: Supervisor) -> Wire | None:
        """A connection from a supervisor of this node; another one of its rank must be gone."""
        if self.monitor is not None and peer.rank in self.monitor.ranks:
            return None
        return self._wire(peer, self.number)

    def dialled(self, peer: End, source: int) -> Wire | None:
        """A connection from another node."""
        return self._wire(peer, source)

    def _wire(self, peer: End, source: int) -> Wire | None:
        monitor = self.monitor
        if self.dead or monitor is None or monitor.dead or monitor.is_stopped:
            return None
        wire = Wire(self.cluster.net, (peer, monitor), (source, self.number))
        monitor.wires.append(wire)
        return wire

    def lose(self) -> None:
        """Power off."""
        for supervisor in self.supervisors.values():
            supervisor.die()
        if self.monitor is not None:
            self.monitor.die()
        self.dead = True

    @property
    def is_over(self) -> bool:
        """Nothing runs here any more."""
        return self.dead or self.ended is not None


class Monitor(Process):
    """One incarnation of the monitor of a node."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.time, node)
        self.node = node
        cluster = self.cluster = node.cluster
        timing, now_s = cluster.timing, node.time.now_s
        self.roster = Roster(node.supervisors, timing, now_s, was_restarted=node.num_monitors > 1)
        self.watch = Watch(node.number, len(cluster.nodes), timing, now_s)
        self.wires: list[Wire] = []
        self.ranks: dict[int, Wire] = {}
        self.leader: Wire | None = None
        self.coordinator: CoordinatorProcess | None = None
        self._asked: list[tuple[Wire, Lead | Propose]] = []
        """Waiting for the disk."""
        self.every(timing.beat_s, self.tick)

    def die(self) -> None:
        """With its coordinator, by the kernel."""
        if self.dead:
            return
        self.dead = True
        if self.coordinator is not None:
            self.coordinator.die()
        for wire in list(self.wires):
            wire.hang_up(self)

    # --- time passes

    def tick(self) -> None:
        node, now_s = self.node, self.time.now_s
        if node.ended is not None:
            return
        self.roster.tick(now_s)
        if self.leader is not None:
            beat = NodeBeat(self.watch.beats(now_s), self.roster.take_beats())
            self.leader.send(self, beat)
        for rank in self.roster.missed(now_s):
            self.tell(RankGone(rank, self.roster.gone[rank]))
        stopped = [rank for rank, each in node.supervisors.items() if each._stopped]
        for rank in self.roster.to_kill(stopped, now_s):
            node.supervisors[rank].die()
        self.keep_coordinator(now_s)
        if self.watch.must_fence(now_s):
            for supervisor in node.supervisors.values():
                if not supervisor.executor.dead:
                    self.cluster.rarity("node fenced itself")
                    supervisor.kill_executor()
        if self.watch.is_alone(now_s):
            self.cluster.rarity("node alone")
            self.end(Ended(1, "no quorum of nodes"))

    def keep_coordinator(self, now_s: float) -> None:
        child = self.coordinator
        if child is not None and not child.dead:
            if child._stopped:
                bound_s = self.cluster.timing.stopped_s
                self.later(bound_s, lambda: child._stopped and child.die())
            return
        if self.watch.wants_leader(now_s):
            self.coordinator = CoordinatorProcess(self.node, self.node.kept.promised + 1)

    def end(self, ended: Ended) -> None:
        """The job is over, on this node."""
        if self.node.ended is not None:
            return
        self.node.ended = ended
        stop = Stop(reason=ended.reason, exit_code=ended.exit_code)
        for wire in self.ranks.values():
            wire.send(self, stop)

    def ask_stop(self) -> None:
        """Now, and whoever follows."""
        if self.node.stop_asked is not None:
            self.tell(self.node.stop_asked)

    # --- connections

    def hear(self, wire: Wire, message: object) -> None:
        if not wire.is_open and not isinstance(wire.other(self), CoordinatorProcess):
            return
        peer = wire.other(self)
        if isinstance(peer, Supervisor):
            self.hear_rank(wire, peer.rank, message)
            return
        match message:
            case Lead() | Propose():
                if self.node.ended is not None:
                    wire.send(self, self.node.ended._replace(was_over=True))
                else:
                    self.ask(wire, message)
            case Ended(was_over=True):
                self.end(message)
            case _ if wire is not self.leader:
                self.cluster.rarity(f"zombie refused: {kind_of(message)}")
            case Leads():
                self.watch.heard(message, self.node.kept.promised)
            case ToRank(rank, order):
                if rank in self.ranks:
                    self.ranks[rank].send(self, order)
            case EvictRank(rank):
                self.node.supervisors[rank].die()
                if rank not in self.ranks:
                    self.tell(RankGone(rank, self.roster.gone.get(rank, "it is not here")))
            case Ended():
                self.end(message)
            case _:
                raise AssertionError(f"unexpected {message}")

    def hear_rank(self, wire: Wire, rank: int, message: object) -> None:
        now_s = self.time.now_s
        if rank not in self.ranks or self.ranks[rank] is not wire:
            self.ranks[rank] = wire
            self.roster.connected(rank, now_s)
            if self.node.ended is not None:
                code, reason, _ = self.node.ended
                wire.send(self, Stop(reason=reason, exit_code=code))
        if isinstance(message, Beat):
            self.roster.heard(rank, now_s, message)
            return
        self.roster.heard(rank, now_s)
        self.tell(FromRank(rank, message))  # type: ignore[arg-type]

    def hung_up(self, wire: Wire) -> None:
        if wire in self.wires:
            self.wires.remove(wire)
        if wire is self.leader:
            self.leader = None
            self.watch.lost_connection()
        peer = wire.other(self)
        if isinstance(peer, Supervisor) and self.ranks.get(peer.rank) is wire:
            del self.ranks[peer.rank]
            self.roster.disconnected(peer.rank, "its supervisor is gone")
            self.tell(RankGone(peer.rank, self.roster.gone[peer.rank]))

    def tell(self, message: object) -> None:
        if self.leader is not None:
            self.leader.send(self, message)

    # --- the quorum: nothing is answered before it is on the disk

    def ask(self, wire: Wire, message: Lead | Propose) -> None:
        self._asked.append((wire, message))
        if len(self._asked) == 1:
            self.soon(self.journal)

    def journal(self) -> None:
        wire, message = self._asked[0]
        kept = self.node.kept
        if isinstance(message, Lead):
            is_led = self.watch.is_led(self.time.now_s) and wire is not self.leader
            answer = answer_lead(kept, message, is_led=is_led)
        else:
            answer = answer_propose(kept, message)
        if answer.kept != kept:
            self.cluster.kept(self.node, answer.kept)
        self.node.kept = answer.kept
        is_probe = isinstance(answer.reply, Promise) and answer.reply.is_probe
        is_refused = isinstance(answer.reply, Superseded)
        if not is_probe and not is_refused and self.leader is not wire:
            if self.leader is not None:
                self.cluster.rarity("leader replaced on a living connection")
                self.leader.hang_up(self)
            self.leader = wire if wire.is_open else None
        self.soon(lambda: self.reply(wire, answer.reply), 0.2)

    def reply(self, wire: Wire, reply: Promise | Accepted | Superseded) -> None:
        wire.send(self, reply)
        if wire is self.leader and isinstance(reply, Promise):
            for rank, evidence in self.roster.gone.items():
                wire.send(self, RankGone(rank, evidence))
            self.ask_stop()
        self._asked.pop(0)
        if self._asked:
            self.soon(self.journal)
