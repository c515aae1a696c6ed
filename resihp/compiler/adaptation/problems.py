"""From groups and prices to what the planner decides on, in whole ticks and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise

from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.capacity import NUM_BUFFERS, room_of
from resihp.compiler.planner.problem import TICK_S, Capacity, Chunks, Problem, Replica
from resihp.ir.model import Group, LayerRange, Op, Plan

__all__ = [
    "PLANNED_ORDER",
    "TICK_S",
    "capacity_of",
    "in_flight_of",
    "least_degree",
    "problem_of",
    "splits_backward",
]


PLANNED_ORDER = "resihp"
"""What the `order` line of a plan says whose streams the planner made."""


def problem_of(situation: Situation, layout: Layout) -> Problem:
    """One iteration of the job on `layout`: its replicas, by number, each with a row of stages.

    For plans whose position s runs stage s (`Situation.has_one_stage_each`).
    """
    assert situation.has_one_stage_each
    previous = situation.previous
    num_stages = situation.placement.num_stages
    groups: list[dict[int, Group]] = [{} for _ in range(num_stages)]
    for group in layout.groups:
        groups[group.pp][group.replica] = group
    rows = _Rows(situation)
    return Problem(
        replicas=tuple(
            rows.of([held.get(replica) for held in groups]) for replica in range(previous.mesh.dp)
        ),
        num_microbatches=previous.batch.microbatches,
        crossing=tuple(
            max(_between_replicas(situation, *both), default=0) for both in pairwise(groups)
        ),
        split=situation.profile.splits_backward or splits_backward(previous),
        in_flight=in_flight_of(previous.schedule, num_stages),
    )


def splits_backward(plan: Plan) -> bool:
    """Whether the streams of `plan` have B and W apart."""
    return any(instr.op is Op.W for stream in plan.streams[:1] for instr in stream.body)


def in_flight_of(schedule: str | None, num_stages: int) -> tuple[int, ...] | None:
    """Most micro-batches between F and B at each stage under a named schedule; None: no bound.

    What the planner made has no bound of its own; that of 1F1B is where its search begins.
    """
    match schedule:
        case "1f1b" | "resihp":
            return tuple(range(num_stages, 0, -1))
        case "zb-h1":
            return (num_stages,) * num_stages
        case "zb-h2":
            return tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        case _:
            return None


def capacity_of(
    situation: Situation, layers: LayerRange, tp: int, *, recomputes: bool = False
) -> Capacity:
    """Of a member of a group of degree `tp` that holds `layers` (`room_of`).

    A micro-batch in flight takes a send buffer too, if those are to have room: in the verifier's
    account it is held until something comes back, and that may be its own gradient.

    Where a plan states no memory there is room for twice as many micro-batches as stages, with
    which every schedule that the planner knows runs without waiting for memory.
    """
    key = layers, tp, recomputes
    if key in situation.rooms:
        return situation.rooms[key]
    sizes = room_of(situation.previous, layers, tp, recomputes=recomputes)
    sent = situation.previous.batch.tokens * situation.pricing.costs.boundary_bytes_per_token
    if situation.reserves_buffers:
        sizes = sizes._replace(activation=sizes.activation + sent, released=sizes.released + sent)
    else:
        sizes = sizes._replace(free=sizes.free + NUM_BUFFERS * sent)
    if situation.previous.memory_bytes is None:
        most = 2 * situation.placement.num_stages
        sizes = sizes._replace(free=most * (sizes.activation + sizes.held))
    situation.rooms[key] = sizes
    return sizes


def least_degree(situation: Situation, pp: int, layers: Sequence[LayerRange]) -> int:
    """k_min of Eq. 3: the lowest TP degree at which a group of `layers` at `pp` has room to work.

    That is the state of all and one micro-batch of each. Twice the mesh's degree where none has.
    """
    degree, most = 1, situation.previous.mesh.tp
    while degree <= most and not _has_room(situation, pp, layers, degree):
        degree *= 2
    return degree


def _has_room(situation: Situation, pp: int, layers: Sequence[LayerRange], tp: int) -> bool:
    device = situation.previous.memory_bytes
    if device is None:
        return True
    sizes = [
        capacity_of(situation, held, tp, recomputes=again)
        for held, again in zip(layers, situation.recomputes(pp), strict=True)
    ]
    needed = sum(device - size.free + size.activation + size.held for size in sizes)
    return needed <= device


class _Rows:
    """Rows of the problem, made once for replicas that are alike in all that prices depend on."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._slow = frozenset(situation.pricing.health.speed)
        self._by_kind: dict[object, Replica] = {}
        self._rows: dict[Replica, Replica] = {}
        self._chunks = situation.chunks

    def of(self, held: Sequence[Group | None]) -> Replica:
        """The row of a replica with these groups; equal ones are one object."""
        kind = tuple(map(self._kind, held, (None, *held)))
        if kind not in self._by_kind:
            row = self._row(held)
            self._by_kind[kind] = self._rows.setdefault(row, row)
        return self._by_kind[kind]

    def _kind(self, group: Group | None, before: Group | None) -> object:
        """All that the prices of a group and of the edge before it depend on."""
        if group is None:
            return None
        edge = None if before is None else _distance(self._situation, before, group)
        again = self._situation.recomputes(group.pp)
        return group.layers, len(group.ranks), self._speed(group), edge, again

    def _speed(self, group: Group) -> float:
        if self._slow.isdisjoint(group.ranks):
            return 1.0
        return self._situation.pricing.speed(group)

    def _row(self, held: Sequence[Group | None]) -> Replica:
        return Replica(
            chunks=tuple(None if group is None else self._chunks_of(group) for group in held),
            memory=tuple(None if group is None else self._memory_of(group) for group in held),
            edges=tuple(
                _crossing_ticks(self._situation, here, there) if here and there else 0
                for here, there in pairwise(held)
            ),
        )

    def _chunks_of(self, group: Group) -> Chunks:
        pricing, layers = self._situation.pricing, group.sole_layers
        (again,) = self._situation.recomputes(group.pp)
        key = layers, group.tp, self._speed(group), again
        if key not in self._chunks:
            seconds = partial(
                pricing.compute_s,
                group,
                layers,
                lengths=self._situation.lengths,
                recomputes=again,
            )
            self._chunks[key] = Chunks(*(_ticks(seconds(op)) for op in (Op.F, Op.B, Op.W)))
        return self._chunks[key]

    def _memory_of(self, group: Group) -> Capacity:
        (again,) = self._situation.recomputes(group.pp)
        return capacity_of(self._situation, group.sole_layers, group.tp, recomputes=again)


def _distance(situation: Situation, here: Group, there: Group) -> object:
    """What the time between two groups depends on, beside their degrees; None is a sound link."""
    cluster, health = situation.pricing.cluster, situation.pricing.health
    one, other = cluster.node_of(here.ranks[0]), cluster.node_of(there.ranks[0])
    return True if one == other else health.link(one, other)


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_S))


def _crossing_ticks(situation: Situation, here: Group, there: Group) -> int:
    """From stage to stage, the slower of both directions."""
    tokens = situation.previous.batch.tokens
    crossing = situation.pricing.crossing
    seconds = max(crossing(here, there, tokens).seconds, crossing(there, here, tokens).seconds)
    return _ticks(seconds)


def _between_replicas(
    situation: Situation, senders: Mapping[int, Group], receivers: Mapping[int, Group]
) -> Iterator[int]:
    """Ticks from a stage of each replica to the next stage of each other replica.

    Pairs of equal degrees and equal distance cost the same and are looked at once. Which they are
    shows among the groups of the sender's node and of the nodes that a slow link joins to it; of
    all others one of each degree is enough.
    """
    node_of = situation.pricing.cluster.node_of
    joined = _joined_by_slow_links(situation)
    on_node: defaultdict[int, list[Group]] = defaultdict(list)
    of_degree: defaultdict[int, list[Group]] = defaultdict(list)
    for there in receivers.values():
        on_node[node_of(there.ranks[0])].append(there)
        of_degree[there.tp].append(there)
    seen: set[object] = set()
    for here in senders.values():
        node = node_of(here.ranks[0])
        close = (on_node[each] for each in (node, *joined.get(node, ())) if each in on_node)
        far = (some for tp, some in of_degree.items() if (here.tp, tp, None) not in seen)
        for there in chain.from_iterable(chain(close, far)):
            kind = here.tp, there.tp, _distance(situation, here, there)
            if there.replica != here.replica and kind not in seen:
                seen.add(kind)
                yield _crossing_ticks(situation, here, there)


def _joined_by_slow_links(situation: Situation) -> Mapping[int, list[int]]:
    """The other ends of the slow links of each node that has some."""
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for link in situation.pricing.health.links:
        one, other = link.nodes
        ends[one].append(other)
        ends[other].append(one)
    return ends
