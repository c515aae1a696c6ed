"""From groups and prices to what the planner decides on, in whole ticks and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.capacity import room_of
from resihp.compiler.planner.problem import TICK_S, Capacity, Chunks, Problem, Replica
from resihp.ir.model import Group, GroupName, LayerRange, Op, Plan

__all__ = [
    "TICK_S",
    "capacity_of",
    "in_flight_of",
    "least_degree",
    "problem_of",
    "splits_backward",
]


def problem_of(situation: Situation, layout: Layout) -> Problem:
    """One iteration of the job on `layout`: its replicas, by number, each with a row of stages.

    For plans whose position s runs stage s (`Situation.has_one_stage_each`).
    """
    assert situation.has_one_stage_each
    previous = situation.previous
    num_stages = situation.placement.num_stages
    groups = {group.name: group for group in layout.groups}
    chunks, memory = _Chunks(situation), _Capacities(situation)
    rows: list[Replica] = []
    for replica in range(previous.mesh.dp):
        held = [groups.get(GroupName(replica, stage)) for stage in range(num_stages)]
        rows.append(
            Replica(
                chunks=tuple(None if group is None else chunks.of(group) for group in held),
                memory=tuple(None if group is None else memory.of(group) for group in held),
                edges=tuple(
                    _crossing_ticks(situation, here, there) if here and there else 0
                    for here, there in pairwise(held)
                ),
            )
        )
    return Problem(
        replicas=_shared(rows),
        num_microbatches=previous.batch.microbatches,
        crossing=tuple(
            max(_between_replicas(situation, groups, stage), default=0)
            for stage in range(num_stages - 1)
        ),
        split=splits_backward(previous),
        in_flight=in_flight_of(previous.schedule, num_stages),
    )


def splits_backward(plan: Plan) -> bool:
    """Whether the streams of `plan` have B and W apart."""
    return any(instr.op is Op.W for stream in plan.streams[:1] for instr in stream.body)


def in_flight_of(schedule: str | None, num_stages: int) -> tuple[int, ...] | None:
    """Most micro-batches between F and B at each stage under a named schedule; None: no bound."""
    match schedule:
        case "1f1b":
            return tuple(range(num_stages, 0, -1))
        case "zb-h1":
            return (num_stages,) * num_stages
        case "zb-h2":
            return tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        case _:
            return None


def capacity_of(situation: Situation, layers: LayerRange, tp: int) -> Capacity:
    """Of a member of a group of degree `tp` that holds `layers` (`room_of`)."""
    return room_of(situation.previous, layers, tp)


def least_degree(situation: Situation, layers: Sequence[LayerRange]) -> int:
    """k_min of Eq. 3: the lowest TP degree at which a group of `layers` has room to work.

    That is the state of all and one micro-batch of each. Twice the mesh's degree where none has.
    """
    degree, most = 1, situation.previous.mesh.tp
    while degree <= most and not _has_room(situation, layers, degree):
        degree *= 2
    return degree


def _has_room(situation: Situation, layers: Sequence[LayerRange], tp: int) -> bool:
    device = situation.previous.memory_bytes
    if device is None:
        return True
    sizes = [capacity_of(situation, held, tp) for held in layers]
    needed = sum(device - size.free + size.activation + size.held for size in sizes)
    return needed <= device


class _Chunks:
    """Costs of groups, looked up once for equal ones."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._known: dict[tuple[LayerRange, int, float], Chunks] = {}

    def of(self, group: Group) -> Chunks:
        pricing, layers = self._situation.pricing, group.sole_layers
        key = layers, group.tp, pricing.speed(group)
        if key not in self._known:
            seconds = partial(pricing.compute_s, group, layers, lengths=self._situation.lengths)
            self._known[key] = Chunks(*(_ticks(seconds(op)) for op in (Op.F, Op.B, Op.W)))
        return self._known[key]


class _Capacities:
    """Memory of groups, looked up once for equal ones."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._known: dict[tuple[LayerRange, int], Capacity] = {}

    def of(self, group: Group) -> Capacity:
        key = group.sole_layers, group.tp
        if key not in self._known:
            self._known[key] = capacity_of(self._situation, *key)
        return self._known[key]


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_S))


def _crossing_ticks(situation: Situation, here: Group, there: Group) -> int:
    """From stage to stage, the slower of both directions."""
    tokens = situation.previous.batch.tokens
    crossing = situation.pricing.crossing
    seconds = max(crossing(here, there, tokens).seconds, crossing(there, here, tokens).seconds)
    return _ticks(seconds)


def _between_replicas(
    situation: Situation, groups: dict[GroupName, Group], stage: int
) -> Iterator[int]:
    """Ticks from `stage` of each replica to the next one that has the stage after it.

    Pairs of equal degrees and equal distance cost the same and are looked at once.
    """
    cluster, health = situation.pricing.cluster, situation.pricing.health
    heres = [group for name, group in groups.items() if name.pp == stage]
    theres = [group for name, group in groups.items() if name.pp == stage + 1]
    seen: set[tuple[int, int, bool, object]] = set()
    for index, here in enumerate(heres):
        there = theres[(index + 1) % len(theres)] if theres else None
        if there is None or there.replica == here.replica:
            continue
        nodes = cluster.node_of(here.ranks[0]), cluster.node_of(there.ranks[0])
        kind = here.tp, there.tp, nodes[0] == nodes[1], health.link(*nodes)
        if kind not in seen:
            seen.add(kind)
            yield _crossing_ticks(situation, here, there)


def _shared(rows: list[Replica]) -> tuple[Replica, ...]:
    """Equal rows as one object."""
    known: dict[Replica, Replica] = {}
    return tuple(known.setdefault(row, row) for row in rows)
