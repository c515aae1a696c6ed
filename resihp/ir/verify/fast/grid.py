"""Every instruction at its place in the grid of stages and micro-batches.

A sound plan has at most one instruction of each kind for each (stage, micro-batch), so that
tables with a row per stage and a column per micro-batch, which hold indices of instructions, say
who computes what and who sends what to whom. All that is to be proved of them are comparisons of
such tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resihp.ir.arrays import ABSENT, Arrays, Ints
from resihp.ir.model import Op
from resihp.ir.verify.fast.stages import sole_stages

__all__ = ["Grid", "Work", "make_grid", "prove_work"]


class Grid(NamedTuple):
    """Indices of instructions, -1 where there is none."""

    tables: dict[Op, Ints]
    """(stage, micro-batch) for each kind that the plan has; micro-batches of a home follow each
    other."""
    others: Ints
    """Instructions without a micro-batch, ascending."""


class Work(NamedTuple):
    """Where everything is computed, by (stage, micro-batch)."""

    forward: Ints
    backward: Ints
    """B or BW."""
    weights: Ints
    """W or BW."""
    lane: Ints


def make_grid(arrays: Arrays) -> Grid | None:
    """The grid; None where an instruction stands twice or something is not computed at all."""
    lanes, num_stages = arrays.lanes, arrays.placement.num_stages
    columns = len(arrays.homes) * arrays.plan.batch.microbatches
    cells = num_stages * columns
    # Each (stage, micro-batch) takes a forward and a backward at least: bounds what follows.
    if 2 * cells > lanes.num_instrs:
        return None
    is_there = np.zeros(len(Op), np.bool_)
    is_there[arrays.table.op] = True
    kinds = [op for op in Op if op.has_micro_batch and is_there[op]]
    place = _places(arrays, kinds, columns)
    if int(place.min()) < 0:
        return None
    slots = np.full(len(kinds) * cells + 1, -1)
    slots[place] = np.arange(lanes.num_instrs)
    slots = slots[:-1]
    others = np.flatnonzero(place == len(slots))
    if np.count_nonzero(slots >= 0) + len(others) != lanes.num_instrs:
        return None
    tables = slots.reshape(len(kinds), num_stages, columns)
    return Grid(dict(zip(kinds, tables, strict=True)), others)


def _places(arrays: Arrays, kinds: list[Op], columns: int) -> Ints:
    """Where each instruction belongs in the tables of `kinds`, one after the other.

    Those without a micro-batch come after the end, and those that name none of several stages
    before the begin.
    """
    table, lanes, per_home = arrays.table, arrays.lanes, arrays.plan.batch.microbatches
    cells = arrays.placement.num_stages * columns
    place_of_kind = np.full(len(Op), len(kinds) * cells)
    place_of_kind[kinds] = np.arange(len(kinds)) * cells
    has_micro_batch = table.op < Op.REDUCE_GRADS
    at_home, no_stage = table.home == ABSENT, table.stage == ABSENT
    number_of_home = np.zeros(arrays.plan.mesh.dp, np.intp)
    number_of_home[arrays.homes] = np.arange(len(arrays.homes))
    within = np.where(no_stage, 0, table.stage) * columns + table.microbatch
    within[~at_home] += number_of_home[table.home[~at_home]] * per_home
    base = place_of_kind[table.op] + np.where(has_micro_batch, within, 0)
    # What depends on the lane: its own home, and its stage where it has only one.
    kind = np.where(has_micro_batch, at_home + 2 * no_stage, 0)
    of_lane = np.zeros((lanes.num, 4), np.intp)
    of_lane[:, 1::2] = (number_of_home[lanes.replica] * per_home)[:, None]
    if no_stage[has_micro_batch].any():
        sole = sole_stages(arrays)
        of_stage = np.where(sole == ABSENT, ABSENT, sole * columns)  # stays negative if absent
        of_lane[:, 2:] += of_stage[lanes.pp][:, None]
    return base[arrays.row] + of_lane.ravel()[kind[arrays.row] + 4 * arrays.lane]


def prove_work(arrays: Arrays, grid: Grid) -> Work | None:
    """Each (stage, micro-batch) has F, then BW or B and then W, in one lane of its position."""
    tables, lanes = grid.tables, arrays.lanes
    forward = tables.get(Op.F)
    split, fused = (Op.B in tables or Op.W in tables), Op.BW in tables
    if forward is None or (split and not (Op.B in tables and Op.W in tables)):
        return None
    if split and fused:
        b, w, bw = tables[Op.B], tables[Op.W], tables[Op.BW]
        # -1 is the only number with its sign bit set: B and W together, and either they or BW.
        if ((b ^ w) < 0).any() or ((b ^ bw) >= 0).any():
            return None
        backward, weights = np.maximum(b, bw), np.maximum(w, bw)
    elif split:
        backward, weights = tables[Op.B], tables[Op.W]
    elif fused:
        backward = weights = tables[Op.BW]
    else:
        return None
    if int(forward.min()) < 0 or not ((forward < backward) & (backward <= weights)).all():
        return None
    lane = arrays.lane[forward]
    if not (weights < lanes.start[lane + 1]).all():
        return None
    position = np.array(arrays.placement.pp)
    if not (lanes.pp[lane] == position[:, None]).all():
        return None
    return Work(forward, backward, weights, lane)
