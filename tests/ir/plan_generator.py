"""Random right plans over the whole language.

A layout is drawn (positions, stages in a loop, in V shape or anyhow, uneven layers, TP degrees,
replicas that lack a position), then who computes what, then an order: a greedy player takes any
work that is ready, again and again, and writes it down in the streams of those who do it. Since
one order of the whole job is behind the streams, every plan can run under the `edge` transport.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from plan_player import MicroBatch, Player

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Level,
    Mesh,
    ModelShape,
    Plan,
    Stream,
)


class Limits(NamedTuple):
    """How large plans may be."""

    num_ranks: int = 24
    """Of all groups together."""
    dp: int = 3
    stages: int = 7
    microbatches: int = 4


LARGE = Limits()
EXECUTABLE = Limits(num_ranks=6, dp=2, stages=6)
"""Small enough to be run by processes of this machine."""


def generate(rng: random.Random, limits: Limits = LARGE) -> Plan:
    """A plan without findings."""
    while True:
        plan = Draft(rng, limits).plan()
        if plan is None:
            continue
        cloned = _with_clones(plan, rng) if rng.random() < 0.2 else plan
        return cloned if len(cloned.active_ranks) <= limits.num_ranks else plan


def _with_clones(plan: Plan, rng: random.Random) -> Plan:
    """With new replicas that do what a replica does that keeps to itself; they share its streams.

    Where there is no such replica, the plan as it is.
    """
    replica = rng.randrange(plan.mesh.dp)
    mine = [group for group in plan.groups if group.replica == replica]
    bodies = [stream for stream in plan.streams if replica in stream.replicas]
    named: dict[bool, set[int | None]] = {False: set(), True: set()}
    """Replicas that occur in the streams of the others, and in its own."""
    for stream in plan.streams:
        for instr in stream.body:
            named[stream in bodies] |= {instr.home, instr.peer}
    if replica in named[False] or named[True] - {None, replica} or len(mine) < plan.mesh.pp:
        return plan
    clones = range(plan.mesh.dp, plan.mesh.dp + rng.randint(1, 2))
    mesh = msgspec.structs.replace(plan.mesh, dp=clones.stop)
    groups, ranks = list(plan.groups), list(range(plan.mesh.world, mesh.world))
    for clone in clones:
        for group in mine:
            members, ranks = tuple(ranks[: group.tp]), ranks[group.tp :]
            groups.append(msgspec.structs.replace(group, replica=clone, ranks=members))
    streams = tuple(
        msgspec.structs.replace(
            stream,
            replicas=(*stream.replicas, *clones),
            body=tuple(msgspec.structs.replace(i, home=None, peer=None) for i in stream.body),
        )
        if stream in bodies
        else stream
        for stream in plan.streams
    )
    return msgspec.structs.replace(
        plan, mesh=mesh, groups=tuple(groups), streams=streams, standby=(*plan.standby, *ranks)
    )


def as_schedule(plan: Plan) -> Plan:
    """Only the computations of `plan`."""
    streams = tuple(
        msgspec.structs.replace(stream, body=tuple(i for i in stream.body if i.op.is_compute))
        for stream in plan.streams
    )
    return msgspec.structs.replace(plan, level=Level.SCHEDULE, streams=streams)


class Draft:
    """Everything that is drawn for one plan."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        self.rng = rng
        self.pp, self.dp = rng.choice((1, 2, 2, 3)), rng.choice(range(1, limits.dp + 1))
        self.tp = rng.choice((1, 1, 2, 4))
        self.positions = _placement(rng, self.pp, limits.stages)
        self.layers = [rng.choice((1, 1, 2, 3)) for _ in self.positions]
        self.microbatches = rng.randint(1, limits.microbatches)
        self.alike = self.dp > 1 and rng.random() < 0.15
        """Whether all replicas do the same and share their streams."""
        self.degrees = self._degrees(limits)

    def _degrees(self, limits: Limits) -> dict[GroupName, int]:
        """TP degree of every group there is; empty where they would need too many ranks."""
        rng = self.rng
        names = [GroupName(replica, pp) for replica in range(self.dp) for pp in range(self.pp)]
        degrees = {
            name: rng.choice([d for d in (1, 1, 2, 4) if d <= self.tp] + [self.tp])
            for name in names
        }
        if self.alike:
            degrees = {name: degrees[GroupName(0, name.pp)] for name in names}
        elif self.dp > 1 and rng.random() < 0.4:
            for name in rng.sample(names, rng.randint(1, len(names) - 1)):
                if any(other.pp == name.pp != other for other in degrees if other != name):
                    del degrees[name]
        return degrees if sum(degrees.values()) <= limits.num_ranks else {}

    def plan(self) -> Plan | None:
        if not self.degrees:
            return None
        bodies = Player(self, self._owners()).bodies
        streams = [
            Stream(replicas=(name.replica,), pp=name.pp, body=tuple(self._spelled(name, body)))
            for name, body in bodies.items()
        ]
        if self.alike:
            streams = [
                msgspec.structs.replace(stream, replicas=tuple(range(self.dp)))
                for stream in streams
            ]
        self.rng.shuffle(streams)
        groups, idle = self._groups()
        num_lost = self.rng.randint(0, len(idle))
        return Plan(
            model=ModelShape(
                name="tiny", layers=sum(self.layers), hidden=8, heads=4, kv_heads=4, ffn=8, vocab=16
            ),
            mesh=Mesh(tp=self.tp, pp=self.pp, dp=self.dp),
            batch=Batch(microbatches=self.microbatches, tokens=self.rng.choice((4, 8))),
            groups=groups,
            streams=tuple(streams),
            standby=tuple(sorted(idle[num_lost:])),
            lost=tuple(sorted(idle[:num_lost])),
        )

    def _groups(self) -> tuple[tuple[Group, ...], list[int]]:
        """The groups, and the ranks that are in none."""
        ranks = list(range(self.tp * self.pp * self.dp))
        if self.rng.random() < 0.5:
            self.rng.shuffle(ranks)
        ends = [sum(self.layers[: stage + 1]) for stage in range(len(self.layers))]
        held = [LayerRange(end - n, end - 1) for end, n in zip(ends, self.layers, strict=True)]
        groups: list[Group] = []
        for name, degree in self.degrees.items():
            members, ranks = ranks[:degree], ranks[degree:]
            layers = tuple(held[s] for s, pp in enumerate(self.positions) if pp == name.pp)
            groups.append(
                Group(replica=name.replica, pp=name.pp, ranks=tuple(members), layers=layers)
            )
        return tuple(groups), ranks

    def _owners(self) -> dict[tuple[int, MicroBatch], int]:
        """The replica that computes each stage of each micro-batch."""
        rng = self.rng
        migrating = 0.0 if self.alike else rng.choice((0.0, 0.0, 0.1, 0.5))
        together = rng.random() < 0.5
        """A micro-batch that finds no group at home goes to one replica with all its stages."""
        owners: dict[tuple[int, MicroBatch], int] = {}
        for home in range(1 if self.alike else self.dp):
            for number in range(self.microbatches):
                favourite = rng.randrange(self.dp)
                for stage, pp in enumerate(self.positions):
                    holders = [name.replica for name in self.degrees if name.pp == pp]
                    owner = home
                    if home not in holders or rng.random() < migrating:
                        owner = rng.choice(holders)
                        if together and favourite in holders:
                            owner = favourite
                    owners[stage, MicroBatch(home, number)] = owner
        return owners

    def _spelled(self, name: GroupName, body: Sequence[Instr]) -> Iterator[Instr]:
        """What may be left out is written out now and then."""
        for instr in body:
            changes: dict[str, int | None] = {}
            if not self.alike:
                spelled = self.rng.random() < 0.1
                for field, value in (("home", instr.home), ("peer", instr.peer)):
                    if value == name.replica and not spelled:
                        changes[field] = None
            if self.positions.count(name.pp) == 1 and self.rng.random() < 0.9:
                changes["stage"] = None
            yield msgspec.structs.replace(instr, **changes)


def _placement(rng: random.Random, pp: int, max_stages: int) -> list[int]:
    """The position of every stage."""
    shape = rng.choice(("plain", "loop", "loop", "V", "V", "any", "any"))
    if shape == "any":
        stages = [*range(pp), *(rng.randrange(pp) for _ in range(rng.randint(0, 2 * pp)))]
        rng.shuffle(stages)
    else:
        line = list(range(pp))
        turns = 1 if shape == "plain" else rng.choice((2, 2, 3))
        stages = [
            position
            for turn in range(turns)
            for position in (line[::-1] if shape == "V" and turn % 2 else line)
        ]
    return stages if len(stages) <= max_stages else list(range(pp))
