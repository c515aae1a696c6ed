"""A plan as arrays: a table of its distinct instructions, and one row number per instruction.

The parser gives equal lines of a text one `Instr`, so a plan of a million instructions has a few
hundred or thousand distinct ones. They are told apart by identity: instructions that are equal
but not the same object cost time, nothing else.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.ir.model import Instr, Level, Op, Plan
from resihp.ir.placement import Placement, placement_of

__all__ = ["ABSENT", "Arrays", "Bits", "Ints", "Lanes", "Table", "arrays_of", "distinct"]

Ints = NDArray[np.intp]
Bits = NDArray[np.bool_]

ABSENT = -(1 << 40)
"""Stands for None; a number that a plan may hold is not negative."""
_LARGEST_SPREAD = 1 << 25
"""Addresses of instructions further apart than this, in units of 16 bytes, are sorted."""


class Table(NamedTuple):
    """The distinct instructions, one column per field."""

    op: Ints
    microbatch: Ints
    home: Ints
    stage: Ints
    peer: Ints
    paired: Bits


class Lanes(NamedTuple):
    """The streams that are looked at, one lane per group, by position in the pipeline."""

    replica: Ints
    pp: Ints
    tp: Ints
    start: Ints
    """Index of the first instruction of each lane, and at the end the number of all."""

    @property
    def num(self) -> int:
        """Number of lanes."""
        return len(self.replica)

    @property
    def num_instrs(self) -> int:
        """Instructions of all lanes together."""
        return int(self.start[-1])


class Arrays(NamedTuple):
    """A plan as arrays. Indices of instructions count through the lanes, one after the other."""

    plan: Plan
    placement: Placement
    table: Table
    lanes: Lanes
    row: Ints
    """Row in the table of each instruction."""
    lane: Ints
    """Lane of each instruction."""
    homes: Ints
    """Replicas whose micro-batches are looked at, ascending."""
    stands_for: Ints
    """For each replica the one that is looked at in its place; -1 where it has no lanes."""


def arrays_of(plan: Plan, kinds: Ints | None = None) -> Arrays | None:
    """The arrays of a plan whose numbers of ranks, replicas, positions and layers are in range.

    Of replicas that do the same (see `resihp.ir.lanes.alike`) only one is in it. `kinds` sets more
    of them apart: a column for each replica, alike only where the whole columns are equal. None
    where an instruction has a number that is out of range or does not belong to its operation.
    """
    bodies: dict[int, tuple[Instr, ...]] = {}
    for stream in plan.streams:
        bodies.setdefault(id(stream.body), stream.body)
    lengths = np.fromiter(map(len, bodies.values()), np.intp, len(bodies))
    objects = np.fromiter(chain.from_iterable(bodies.values()), np.object_, int(lengths.sum()))
    if not len(objects):
        return None
    first, rows = distinct(objects)
    placement = placement_of(plan)
    table = _table(objects[first].tolist())
    if table is None or not _in_range(table, plan, placement.num_stages):
        return None
    cuts = np.concatenate(([0], np.cumsum(lengths)))
    body_at, tp_at = _layout(plan, {key: number for number, key in enumerate(bodies)})
    if not np.array_equal(body_at >= 0, tp_at > 0):
        return None
    same = (body_at, tp_at) if kinds is None else (body_at, tp_at, kinds)
    stands_for = _stand_ins(body_at, same, table, _elsewhere(table, rows, cuts))
    scope = np.flatnonzero(stands_for == np.arange(plan.mesh.dp))
    has_lane = body_at >= 0
    pp, column = np.nonzero(has_lane[:, scope])
    replica = scope[column]
    body = body_at[pp, replica]
    start = np.concatenate(([0], np.cumsum(lengths[body])))
    lanes = Lanes(replica, pp, tp_at[pp, replica], start)
    without_lanes = np.flatnonzero(~has_lane.any(axis=0))
    return Arrays(
        plan=plan,
        placement=placement,
        table=table,
        lanes=lanes,
        row=_expand(rows, cuts, body),
        lane=np.repeat(np.arange(len(body)), lengths[body]),
        homes=np.union1d(scope, without_lanes),
        stands_for=stands_for,
    )


def distinct(objects: NDArray[np.object_]) -> tuple[Ints, Ints]:
    """Index of one of each distinct object, and for every object which of these it is."""
    # An array of objects holds their addresses; no two objects share one rounded to 16 bytes.
    address = np.frombuffer(objects, np.intp) >> 4
    offset = address - address.min()
    spread = int(offset.max()) + 1
    if spread > _LARGEST_SPREAD:
        _, first, rows = np.unique(offset, return_index=True, return_inverse=True)
        return first, rows
    # Only what is written below is read.
    mark = np.empty(spread, np.intp)
    index = np.arange(len(objects))
    mark[offset] = index
    first = np.flatnonzero(mark[offset] == index)
    mark[offset[first]] = np.arange(len(first))
    return first, mark[offset]


def _table(instrs: list[Instr]) -> Table | None:
    """The columns; None if a number does not fit into one."""
    try:
        return Table(
            op=np.fromiter(map(attrgetter("op"), instrs), np.intp, len(instrs)),
            microbatch=_column(instrs, "microbatch"),
            home=_column(instrs, "home"),
            stage=_column(instrs, "stage"),
            peer=_column(instrs, "peer"),
            paired=np.fromiter(map(attrgetter("paired"), instrs), np.bool_, len(instrs)),
        )
    except OverflowError:
        return None


def _column(instrs: list[Instr], name: str) -> Ints:
    values: list[int | None] = list(map(attrgetter(name), instrs))
    # Most columns have no None, or nothing else.
    if None not in values:
        return np.fromiter(values, np.intp, len(values))
    if values.count(None) == len(values):
        return np.full(len(values), ABSENT)
    filled = [ABSENT if value is None else value for value in values]
    return np.fromiter(filled, np.intp, len(values))


def _in_range(table: Table, plan: Plan, num_stages: int) -> bool:
    """Whether each instruction has the numbers that its operation needs, and no others."""
    op, transfers = table.op, np.zeros(len(Op), np.bool_)
    transfers[[each for each in Op if each.is_transfer]] = True
    has_micro_batch = op < Op.REDUCE_GRADS
    schedule = plan.level is Level.SCHEDULE
    return bool(
        not (schedule and (op > Op.BW).any())
        and _between(table.microbatch, plan.batch.microbatches, where=has_micro_batch)
        and (has_micro_batch == (table.microbatch != ABSENT)).all()
        and _between(table.home, plan.mesh.dp, where=has_micro_batch & (table.home != ABSENT))
        and (has_micro_batch | (table.home == ABSENT)).all()
        and _between(table.stage, num_stages, where=table.stage != ABSENT)
        and ((op != Op.STEP) | (table.stage == ABSENT)).all()
        and _between(table.peer, plan.mesh.dp, where=table.peer != ABSENT)
        and (transfers[op] | (table.peer == ABSENT)).all()
        and ((op <= Op.BW) | ~table.paired).all()
    )


def _between(values: Ints, bound: int, *, where: Bits) -> bool:
    return bool((~where | ((values >= 0) & (values < bound))).all())


def _layout(plan: Plan, number_of: dict[int, int]) -> tuple[Ints, Ints]:
    """The body (-1: none) and the TP degree (0: no group) at each (position, replica)."""
    shape = plan.mesh.pp, plan.mesh.dp
    body_at, tp_at = np.full(shape, -1), np.zeros(shape, np.intp)
    for stream in plan.streams:
        body_at[stream.pp, list(stream.replicas)] = number_of[id(stream.body)]
    for group in plan.groups:
        tp_at[group.pp, group.replica] = len(group.ranks)
    return body_at, tp_at


def _elsewhere(table: Table, rows: Ints, cuts: Ints) -> Bits:
    """Which bodies name another replica, or a replica at all."""
    named = (table.home != ABSENT) | (table.peer != ABSENT)
    if not named.any():
        return np.zeros(len(cuts) - 1, np.bool_)
    total = np.concatenate(([0], np.cumsum(named[rows])))
    return total[cuts[1:]] > total[cuts[:-1]]


def _stand_ins(body_at: Ints, same: tuple[Ints, ...], table: Table, elsewhere: Bits) -> Ints:
    """For each replica the first of those that do the same; -1 where it has no lanes."""
    alone: Bits = np.array(np.append(elsewhere, False)[body_at].any(axis=0))
    for named in (table.home, table.peer):
        alone[named[named != ABSENT]] = True
    has_lane: Bits = np.array((body_at >= 0).any(axis=0))
    stands_for = np.where(has_lane, np.arange(len(body_at.T)), -1)
    # One row of bytes per replica.
    columns = np.ascontiguousarray(np.concatenate(same).T)
    firsts: dict[bytes, int] = {}
    for replica in np.flatnonzero(has_lane & ~alone).tolist():
        stands_for[replica] = firsts.setdefault(columns[replica].tobytes(), replica)
    return stands_for


def _expand(rows: Ints, cuts: Ints, body: Ints) -> Ints:
    """The rows of each lane's body, one lane after the other."""
    if np.array_equal(body, np.arange(len(cuts) - 1)):
        return rows
    ends: list[int] = cuts.tolist()
    numbers: list[int] = body.tolist()
    return np.concatenate([rows[ends[number] : ends[number + 1]] for number in numbers])
