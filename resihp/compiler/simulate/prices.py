"""The prices of a whole plan as arrays, and which replicas are alike in them.

Everything a price depends on is looked up once per kind: compute by (layers, TP degree, speed),
tensors by degrees, whether the two groups share a node, and which slow link is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.compiler.costs import Lengths
from resihp.compiler.links import Crossing
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate.course import Course
from resihp.compiler.simulate.times import Floats, Prices
from resihp.errors import UserError
from resihp.ir.arrays import Ints
from resihp.ir.lanes import COMPUTE
from resihp.ir.model import Group, Level, Op, Plan
from resihp.ir.placement import placement_of

__all__ = [
    "Places",
    "kinds_of",
    "lane_groups",
    "lengths_of",
    "of_crossings",
    "places_of",
    "prices_of",
]

_NUM_OPS = len(Op)


class Places(NamedTuple):
    """What prices depend on, by (position, replica); where there is no group any number."""

    group: NDArray[np.object_]
    """None where there is none."""
    speed: Floats
    node: Ints


def places_of(plan: Plan, pricing: Pricing) -> Places:
    """Speed and node of every group. Raises UserError where one has a lost rank."""
    groups = plan.groups
    members = list(map(attrgetter("ranks"), groups))
    size = np.fromiter(map(len, members), np.intp, len(groups))
    ranks = np.fromiter(chain.from_iterable(members), np.intp, int(size.sum()))
    first = np.cumsum(size) - size
    of_rank = np.ones(plan.mesh.world)
    for rank in {*pricing.health.speed, *pricing.health.lost} & set(range(plan.mesh.world)):
        of_rank[rank] = pricing.health.speed_of(rank)
    slowest = np.minimum.reduceat(of_rank[ranks], first)
    if not slowest.all():
        group = groups[int(np.argmin(slowest))]
        lost = next(rank for rank in group.ranks if rank in pricing.health.lost)
        raise UserError(
            f"rank {lost} is lost, and {group.name} of the plan needs it; `resihp adapt` makes a "
            f"plan without it"
        )
    shape = plan.mesh.pp, plan.mesh.dp
    pp = np.fromiter(map(attrgetter("pp"), groups), np.intp, len(groups))
    replica = np.fromiter(map(attrgetter("replica"), groups), np.intp, len(groups))
    places = Places(np.full(shape, None), np.ones(shape), np.zeros(shape, np.intp))
    places.group[pp, replica] = np.fromiter(groups, np.object_, len(groups))
    places.speed[pp, replica] = slowest
    places.node[pp, replica] = ranks[first] // pricing.cluster.cluster.gpus_per_node
    return places


def kinds_of(
    plan: Plan, pricing: Pricing, places: Places, lengths: Sequence[Lengths] | None = None
) -> Ints:
    """What sets replicas apart beside TP degrees and instructions: a column for each replica."""
    by_place = [places.speed]
    if lengths is not None:
        by_place += (each.reshape(plan.mesh.dp, -1).T for each in lengths_of(plan, lengths))
    # Numbers are told apart by their bits.
    rows = [np.ascontiguousarray(each).view(np.int64) for each in by_place]
    pp = np.array(placement_of(plan).pp, np.intp)
    one, other = places.node[pp[:-1]], places.node[pp[1:]]
    rows += [(one == other).astype(np.intp), _slow_link(pricing, one, other)]
    return np.concatenate(rows)


def _slow_link(pricing: Pricing, here: Ints, there: Ints) -> Ints:
    """Number of the slow link between nodes, 0 where there is none."""
    found = np.zeros(here.shape, np.intp)
    for number, link in reversed(list(enumerate(pricing.health.links, 1))):
        one, other = link.nodes
        between = ((here == one) & (there == other)) | ((here == other) & (there == one))
        found[between & (here != there)] = number
    return found


def lengths_of(plan: Plan, lengths: Sequence[Lengths] | None) -> tuple[Floats, Floats]:
    """Tokens and squared document lengths of every micro-batch, home after home.

    Without `lengths` each is one document of the batch's tokens; fewer than there are repeat.
    """
    count = plan.mesh.dp * plan.batch.microbatches
    if lengths is None:
        nominal = Lengths.of((plan.batch.tokens,))
        return np.full(count, float(nominal.tokens)), np.full(count, float(nominal.pairs))
    if not lengths:
        raise UserError("the list of lengths is empty; it has at least one micro-batch")
    each = np.array(lengths, np.float64)
    return np.resize(each[:, 0], count), np.resize(each[:, 1], count)


def prices_of(
    course: Course, pricing: Pricing, places: Places, lengths: tuple[Floats, Floats] | None = None
) -> Prices:
    """All prices. `lengths` are those of all micro-batches (`lengths_of`); None: nominal ones."""
    delay = of_crossings(course, pricing, places, lambda crossing: crossing.seconds)
    return Prices(_durations(course, pricing, places, lengths), delay)


def lane_groups(course: Course, places: Places) -> list[Group]:
    """The group of each lane."""
    lanes = course.arrays.lanes
    return places.group[lanes.pp, lanes.replica].tolist()


class _Rates(NamedTuple):
    """Seconds by (lane, stage) and operation: `fixed + per_token * N + per_pair * sum(l^2)`."""

    fixed: Floats
    per_token: Floats
    per_pair: Floats


def _rates(course: Course, pricing: Pricing, places: Places) -> _Rates:
    lanes, held = course.arrays.lanes, course.held
    layers = course.arrays.placement.layers
    rates = _Rates(*(np.zeros((len(held.lane), _NUM_OPS)) for _ in range(3)))
    kind = held.stage * (int(lanes.tp.max()) + 1) + lanes.tp[held.lane]
    speed = places.speed[lanes.pp[held.lane], lanes.replica[held.lane]]
    for entries in _by_kind(kind):
        entry = int(entries[0])
        stage = int(held.stage[entry])
        cost = pricing.stage(
            layers[stage],
            int(lanes.tp[held.lane[entry]]),
            recomputes=stage in course.arrays.plan.recompute,
        )
        for op in COMPUTE:
            price, slowed = cost.of(op), speed[entries]
            rates.fixed[entries, op] = price.comm_fixed_s
            rates.per_token[entries, op] = price.per_token_s / slowed + price.comm_per_token_s
            rates.per_pair[entries, op] = price.per_pair_s / slowed
    return rates


def _by_kind(kind: Ints) -> list[Ints]:
    """Indices of the entries of each kind."""
    order = np.argsort(kind, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(kind[order])) + 1)


def _price_ends(course: Course, pricing: Pricing, places: Places, duration: Floats) -> None:
    """`reduce_grads` by stage, and `step`, the last instruction of every lane."""
    plan, placement = course.arrays.plan, course.arrays.placement
    if plan.level is not Level.PLAN:
        return
    holders: dict[int, list[Group]] = {}
    for group in plan.groups:
        holders.setdefault(group.pp, []).append(group)
    busy = pricing.busy(plan.groups)
    reduce_s = [
        pricing.reduce_s(holders[pp], layers, busy)
        for pp, layers in zip(placement.pp, placement.layers, strict=True)
    ]
    duration[course.meetings.at] = np.array(reduce_s)[course.meetings.stage]
    lanes, groups = course.arrays.lanes, lane_groups(course, places)
    last = lanes.start[1:] - 1
    for members in _by_kind(lanes.pp * (int(lanes.tp.max()) + 1) + lanes.tp):
        duration[last[members]] = pricing.step_s(groups[int(members[0])])


def _durations(
    course: Course, pricing: Pricing, places: Places, lengths: tuple[Floats, Floats] | None
) -> Floats:
    arrays, work = course.arrays, course.work
    rates = _rates(course, pricing, places)
    entry = course.held.entry(work.lane, np.arange(course.num_stages)[:, None])
    if lengths is None:
        nominal = Lengths.of((arrays.plan.batch.tokens,))
        whole = rates.fixed + rates.per_token * nominal.tokens + rates.per_pair * nominal.pairs

        def seconds(op: Op) -> Floats:
            return whole[:, op][entry]
    else:
        count = arrays.plan.batch.microbatches
        columns = (arrays.homes[:, None] * count + np.arange(count)).ravel()
        tokens, pairs = lengths[0][columns], lengths[1][columns]

        def seconds(op: Op) -> Floats:
            per_token, per_pair = rates.per_token[:, op][entry], rates.per_pair[:, op][entry]
            return rates.fixed[:, op][entry] + per_token * tokens + per_pair * pairs

    duration = np.zeros(arrays.lanes.num_instrs)
    duration[work.forward] = seconds(Op.F)
    fused = work.backward == work.weights
    if fused.all():
        duration[work.backward] = seconds(Op.BW)
    else:
        duration[work.weights] = seconds(Op.W)
        duration[work.backward] = seconds(Op.B)
        if fused.any():
            duration[work.backward[fused]] = seconds(Op.BW)[fused]
    _price_ends(course, pricing, places, duration)
    return duration


def of_crossings(
    course: Course, pricing: Pricing, places: Places, price: Callable[[Crossing], float]
) -> Floats:
    """A price of each crossing, whole or in chunks as the plan has it; in a schedule the faster."""
    arrays, crossings = course.arrays, course.crossings
    if not len(crossings.sent):
        return np.zeros(0)
    kind, example = _crossing_kinds(course, pricing, places)
    groups, plan = lane_groups(course, places), arrays.plan
    seconds = np.zeros(len(example))
    for number in np.flatnonzero(example >= 0).tolist():
        at = int(example[number])
        pair = groups[int(crossings.sender[at])], groups[int(crossings.receiver[at])]
        cut = bool(crossings.is_cut[at]) if plan.level is Level.PLAN else None
        seconds[number] = price(pricing.crossing(*pair, plan.batch.tokens, cut=cut))
    return seconds[kind]


def _crossing_kinds(course: Course, pricing: Pricing, places: Places) -> tuple[Ints, Ints]:
    """Crossings of one kind cost the same: the kind of each, and one of each kind (-1: none)."""
    lanes, crossings = course.arrays.lanes, course.crossings
    degrees, degree = np.unique(lanes.tp, return_inverse=True)
    node = places.node[lanes.pp, lanes.replica]
    here, there = node[crossings.sender], node[crossings.receiver]
    kind = degree[crossings.sender] * len(degrees) + degree[crossings.receiver]
    kind = 2 * kind + crossings.is_cut
    kind = 2 * kind + (here == there)
    if pricing.health.links:
        kind = kind * (len(pricing.health.links) + 1) + _slow_link(pricing, here, there)
    example = np.full(int(kind.max()) + 1, -1)
    example[kind] = np.arange(len(kind))
    return kind, example
