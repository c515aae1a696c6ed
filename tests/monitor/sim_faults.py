"""Faults of the simulated cluster, and schedules of them that are functions of a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim_cluster import PLAIN, Cluster, Traits
from sim_coordinator import CoordinatorProcess
from sim_state import plan_of
from sim_time import Process

from resihp.monitor.coordinator import Phase

SHAPES = [
    (1, (2, 1, 2)),
    (2, (2, 1, 2)),
    (3, (1, 1, 3)),
    (4, (2, 1, 2)),
    (2, (2, 2, 2)),
    (4, (2, 2, 2)),
]
"""Nodes, and degrees TP, PP, DP."""
LIMIT_S = 3000.0
LEGAL_REASONS = {
    "finished": "",
    "stopped by SIGTERM": "T",
    "no plan can carry": "kuUhnNLposa",
    "no rank is left": "kuUhnNLposa",
    "no quorum of nodes": "nNLpo",
    "is damaged": "D",
    "before the start": "",
    "did not get ready": "",
    "no instruction finished": "h",
    "times in a row": "bpo",
    "neither settled nor died": "o",
}
"""How a job may end, and of which faults one must have struck for that; none: any schedule.

A hang before the first times are known looks like a step that is slow. Links that break again and
again without a loss need a cut, and a survivor that neither settles nor dies one that only orders
do not get through.
"""


class Faults:
    """What can be done to a cluster; each at something random that is still there."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.random = cluster.random
        self.struck: set[str] = set()
        """Kinds that did."""

    def strike(self, kinds: str) -> None:
        """One fault of one of `kinds`."""
        faults: dict[str, Callable[[], None]] = {
            "c": self.kill_coordinator,
            "C": self.stop_coordinator,
            "m": self.kill_monitor,
            "M": self.stop_monitor,
            "w": self.snap_wires,
            "k": self.kill_executor,
            "u": self.kill_supervisor,
            "U": self.stop_supervisor,
            "h": self.hang_executor,
            "b": self.break_link,
            "n": self.lose_node,
            "N": self.pause_node,
            "L": self.pause_leader,
            "p": self.partition,
            "o": self.deafen,
            "s": self.kill_holders,
            "a": self.kill_all_executors,
            "T": self.ask_stop,
            "D": self.damage_version,
        }
        kind = self.random.choice(kinds)
        self.struck.add(kind)
        faults[kind]()

    def _one(self, things: list) -> list:
        return [self.random.choice(things)] if things else []

    def _for_a_while(self, process: Process, longest_s: float) -> None:
        process.stop()
        seconds = self.random.choice([0.1, 0.5, 1.0]) * longest_s
        self.cluster.time.after(seconds, process.go_on)

    def kill_coordinator(self) -> None:
        for process in self._one(self.cluster.coordinators):
            process.die()

    def stop_coordinator(self) -> None:
        """It is killed when it does not go on soon, or goes on and finds another one leading."""
        for process in self._one(self.cluster.coordinators):
            self._for_a_while(process, 3.0)

    def _monitors(self) -> list:
        nodes = [node for node in self.cluster.nodes if not node.is_over]
        return [node.monitor for node in nodes if node.monitor and not node.monitor.dead]

    def kill_monitor(self) -> None:
        for monitor in self._one(self._monitors()):
            monitor.die()

    def stop_monitor(self) -> None:
        for monitor in self._one(self._monitors()):
            self._for_a_while(monitor, 3.0)

    def snap_wires(self) -> None:
        """Connections to one coordinator break, with what was under way."""
        for process in self._one(self.cluster.coordinators):
            for wire in list(process.wires.values()):
                if self.random.random() < 0.5:
                    wire.snap()

    def _live(self) -> list:
        return [each for each in self.cluster.supervisors if not each.executor.dead]

    def kill_executor(self) -> None:
        for supervisor in self._one(self._live()):
            supervisor.kill_executor()

    def kill_holders(self) -> None:
        """All executors that hold some shard."""
        for supervisor in self._one(self._live()):
            deploy = supervisor.executor.deploy
            group = plan_of(deploy.plan).group_of(supervisor.rank) if deploy is not None else None
            if deploy is not None and group is not None:
                self.cluster.rarity("all holders of a shard lost")
                member = group.ranks.index(supervisor.rank)
                same = [each for each in plan_of(deploy.plan).groups if each.pp == group.pp]
                ranks = {each.ranks[min(member, each.tp - 1)] for each in same}
                for other in self._live():
                    if other.rank in ranks:
                        other.kill_executor()

    def kill_all_executors(self) -> None:
        for supervisor in self._live():
            supervisor.kill_executor()

    def ask_stop(self) -> None:
        """SIGTERM to one node, or, as a scheduler sends it, to all; maybe said again."""
        nodes = [node for node in self.cluster.nodes if not node.is_over]
        for node in nodes if self.random.random() < 0.5 else self._one(nodes):
            node.terminate()

    def damage_version(self) -> None:
        """Of the newest one, bytes that nobody looks at before they are loaded."""
        for version in self.cluster.disk.listed()[:1]:
            self.cluster.rarity("version damaged")
            self.cluster.disk.damage(version.name)

    def kill_supervisor(self) -> None:
        for supervisor in self._one(self._live()):
            supervisor.die()

    def stop_supervisor(self) -> None:
        """The process alone: its executor works on, unseen."""
        for supervisor in self._one(self._live()):
            self._for_a_while(supervisor, 12.0)

    def hang_executor(self) -> None:
        """It does nothing any more, also not when it is told to leave."""
        for supervisor in self._one(self._live()):
            supervisor.executor.stop()

    def break_link(self) -> None:
        """A connection between two executors, which both live; perhaps what they say is lost."""
        loses = self.random.random() < 0.5
        live = [each.executor for each in self._live() if each.executor.deploy is not None]
        if len(live) > 1:
            for executor in self.random.sample(live, 2):
                if executor.deploy is not None:
                    number = executor.deploy.generation
                    executor.do(lambda executor=executor, number=number: executor.lost_peer(number))
                    monitor = self.cluster.nodes[executor.supervisor.node].monitor
                    if loses and monitor is not None:
                        monitor.die()

    def lose_node(self) -> None:
        """Power off; its peers are told by nobody but a refused connection."""
        for node in self._one([node for node in self.cluster.nodes if not node.is_over]):
            self.cluster.rarity("node lost")
            node.lose()

    def pause_node(self) -> None:
        """A whole machine is stopped for a while, and goes on as if nothing had been."""
        for node in self._one([node for node in self.cluster.nodes if not node.is_over]):
            self.cluster.rarity("node paused")
            self._for_a_while(node, 40.0)

    def pause_leader(self) -> None:
        """The machine of whoever leads; what comes meanwhile waits in its sockets."""
        leaders = [each for each in self.cluster.coordinators if each.leads]
        for process in self._one([each for each in leaders if not each.node.is_over]):
            self.cluster.rarity("leader paused")
            self._for_a_while(process.node, 40.0)

    def partition(self) -> None:
        """Two sides that hear nothing of each other, for a while."""
        nodes = range(len(self.cluster.nodes))
        side = {node for node in nodes if self.random.random() < 0.5}
        if 0 < len(side) < len(nodes):
            self.cluster.rarity("partition")
            for a in side:
                for b in set(nodes) - side:
                    self.cluster.net.cut(a, b)
                    self.cluster.net.cut(b, a)
        self._mend()

    def deafen(self) -> None:
        """One direction between two nodes, or all that one node sends, is lost for a while."""
        nodes = range(len(self.cluster.nodes))
        source = self.random.choice(nodes)
        targets = [self.random.choice(nodes)] if self.random.random() < 0.5 else nodes
        self.cluster.rarity("one-way partition")
        for target in targets:
            self.cluster.net.cut(source, target)
        self._mend()

    def _mend(self) -> None:
        self.cluster.time.after(
            self.random.choice([1.0, 4.0, 15.0, 60.0, 300.0]), self.cluster.net.mend_all
        )


def cluster_of(seed: int, traits: Traits = PLAIN) -> Cluster:
    num_nodes, degrees = SHAPES[seed % len(SHAPES)]
    return Cluster(seed, num_nodes=num_nodes, degrees=degrees, traits=traits)


def plague(cluster: Cluster, kinds: str, *, most: int, at_start: bool = False) -> Faults:
    """Faults in random phases, when a vote is complete, and at any time."""
    faults, chance = Faults(cluster), cluster.random
    left = chance.randint(1, most)
    of_phase, of_vote = (0.3, 0.1) if cluster.traits is PLAIN else (0.15, 0.06)
    cluster.may_hang = bool(set(kinds) & set("hUNLpo"))

    def soon(longest_s: float) -> None:
        nonlocal left
        left -= 1
        cluster.time.after(chance.uniform(0, longest_s), lambda: faults.strike(kinds))

    def on_phase(_: CoordinatorProcess, phase: Phase) -> None:
        if phase is Phase.STARTING and not at_start:
            return
        while left > 0 and chance.random() < of_phase:
            soon(0.2)

    def on_vote() -> None:
        if left > 0 and chance.random() < of_vote:
            soon(0.06)

    def on_fence(rank: int) -> None:
        nonlocal left
        monitor = cluster.nodes[cluster.node_of(rank)].monitor
        if left > 0 and "m" in kinds and monitor is not None and chance.random() < 0.5:
            left -= 1
            faults.struck.add("m")
            cluster.time.after(chance.uniform(0, 0.02), monitor.die)

    cluster.on_phase, cluster.on_vote, cluster.on_fence = on_phase, on_vote, on_fence
    return faults


class Family(NamedTuple):
    """Schedules of one kind."""

    kinds: str
    most: int
    """Faults of one schedule."""
    ends: tuple[str, ...] = ()
    """How they must end; empty: in any legal way."""
    at_start: bool = False
    traits: Traits = PLAIN
    terminated: bool = False
    """Whether the job is told to end, and saves."""


RETURNS = Traits(num_steps=12, returns=True)
SAVES = Traits(num_steps=12, returns=True, saves=True)
SNAPSHOTS = Traits(num_steps=12, returns=True, snapshots=True)
ALL = Traits(num_steps=12, returns=True, saves=True, snapshots=True)
FAMILIES = {
    "coordinators": Family("cC", 5, ends=("finished",)),
    "monitors": Family("mMw", 5, ends=("finished",)),
    "control": Family("cCmMw", 6, ends=("finished",)),
    "ranks": Family("kuUh", 4),
    "links": Family("bbcmMw", 6, ends=("finished", "times in a row")),
    "mixed": Family("kuUhbcCmMw", 6),
    "nodes": Family("nNpo", 3),
    "pauses": Family("LLNk", 4),
    "partitions": Family("po", 4),
    "everything": Family("kuUhbcCmMwnNLpo", 7),
    "terminated": Family(
        "cCmMw",
        5,
        ends=("finished", "stopped by SIGTERM"),
        at_start=True,
        traits=Traits(saves=True),
        terminated=True,
    ),
    "start": Family("kucmnpo", 2, at_start=True),
    "start_returns": Family("kkuucCmMw", 5, at_start=True, traits=RETURNS),
    "returns": Family("kkku", 5, traits=RETURNS),
    "returns_control": Family("kkucCmMwb", 7, traits=RETURNS),
    "returns_nodes": Family("kkuUhnNLpo", 5, traits=RETURNS),
    "saves": Family("ksacCmMwD", 6, traits=SAVES),
    "saves_nodes": Family("ksacNLpo", 7, traits=SAVES),
    "saves_end": Family("kscmwTT", 4, traits=SAVES),
    "snapshots": Family("kkssa", 5, traits=SNAPSHOTS),
    "snapshots_control": Family("kkssacCmMw", 7, traits=SNAPSHOTS),
    "state": Family("ksaUhbcCmMwNLpoDT", 7, traits=ALL),
}
"""By name. Control plane alone: training is never lost, whoever dies."""


def run_schedule(family: str, seed: int) -> tuple[str, frozenset[str]]:
    """How it ended, in a word, and the rare cases in it. AssertionError where anything is wrong."""
    kind = FAMILIES[family]
    cluster = cluster_of(seed, kind.traits)
    faults = plague(cluster, kind.kinds, most=kind.most, at_start=kind.at_start)
    if kind.terminated:
        faults.struck.add("T")
        end_s = cluster.random.uniform(2.0, cluster.random.choice([4.0, 8.0, 30.0]))
        cluster.time.after(end_s, cluster.terminate)
    ends = cluster.run(LIMIT_S)
    is_decided = any(node.kept.entry is not None for node in cluster.nodes)
    word = _outcome(ends, faults.struck, kind, is_decided=is_decided)
    assert not kind.ends or word in kind.ends, f"ended with {word!r}"
    return word, frozenset(cluster.rarities)


def _outcome(
    ends: list[tuple[int, str]], struck: set[str], kind: Family, *, is_decided: bool
) -> str:
    """`is_decided`: whether some node knows of a plan that was decided on."""
    for _, reason in ends:
        words = [legal for legal in LEGAL_REASONS if legal in reason]
        assert words, reason
        causes = LEGAL_REASONS[words[0]]
        assert not causes or struck.intersection(causes), f"{reason}, of faults {sorted(struck)}"
        is_start = words[0] in ("before the start", "did not get ready")
        # Before the first plan is decided, whoever takes over begins with the start again.
        begins_again = kind.at_start or not is_decided
        if kind.traits.returns:  # who is killed is started again, also then
            begins_again = False
        assert begins_again or struck.intersection("nNLpo") or not is_start, reason
    if not ends:
        return "all nodes lost"
    # A node that was cut off ends alone; what the others say is the end of the job.
    reasons = [reason for code, reason in ends if code != 1] or [reason for _, reason in ends]
    return next(legal for legal in LEGAL_REASONS if legal in reasons[0])
