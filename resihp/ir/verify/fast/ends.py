"""Instructions without a micro-batch: reductions, steps and gathered parameters."""

from __future__ import annotations

import numpy as np

from resihp.ir.arrays import Arrays
from resihp.ir.model import Level, Op
from resihp.ir.verify.fast.grid import Grid, Work
from resihp.ir.verify.fast.progress import Meetings
from resihp.ir.verify.fast.stages import Held, stages_of

__all__ = ["prove_ends", "prove_params"]


def prove_ends(arrays: Arrays, held: Held, grid: Grid, work: Work) -> Meetings | None:
    """Each lane reduces each of its stages once, after all its work, and ends with step.

    A schedule has neither.
    """
    if arrays.plan.level is Level.SCHEDULE:
        none = np.zeros(0, np.intp)
        return Meetings(none, none, none)
    op = arrays.table.op[arrays.row[grid.others]]
    if not np.array_equal(grid.others[op == Op.STEP], arrays.lanes.start[1:] - 1):
        return None
    at = grid.others[op == Op.REDUCE_GRADS]
    lane, stage = arrays.lane[at], stages_of(arrays, at)
    order = np.lexsort((stage, lane))
    at, lane, stage = at[order], lane[order], stage[order]
    if not (np.array_equal(lane, held.lane) and np.array_equal(stage, held.stage)):
        return None
    reduce = at[held.entry(work.lane, np.arange(len(held.number))[:, None])]
    # Everything else of a stage comes before one of these, or is refused as part of the data flow.
    last = (work.weights, *(grid.tables.get(op) for op in (Op.SEND_ACT, Op.SEND_GRAD)))
    if any(table is not None and (table >= reduce).any() for table in last):
        return None
    return Meetings(at, lane, stage)


def prove_params(arrays: Arrays, held: Held, grid: Grid, work: Work) -> bool:
    """Where a lane gathers or frees a stage, the two alternate and all work is between them."""
    op = arrays.table.op[arrays.row[grid.others]]
    at = grid.others[(op == Op.GATHER_PARAMS) | (op == Op.FREE_PARAMS)]
    if not len(at):
        return True
    lane, stage = arrays.lane[at], stages_of(arrays, at)
    position = np.array(arrays.placement.pp)
    if (stage < 0).any() or (position[stage] != arrays.lanes.pp[lane]).any():
        return False
    place = held.entry(lane, stage)
    order = np.argsort(place, kind="stable")
    at, place = at[order], place[order]
    gathers = arrays.table.op[arrays.row[at]] == Op.GATHER_PARAMS
    # Gather, free, gather, ... of one place after the other.
    turn = np.arange(len(at)) % 2 == 0
    same = place[1:] == place[:-1]
    if len(at) % 2 or (gathers != turn).any() or not same[::2].all():
        return False
    at_place = held.entry(work.lane, np.arange(len(held.number))[:, None])
    is_named = np.zeros(len(held.lane), np.bool_)
    is_named[place] = True
    named = is_named[at_place]
    num_instrs = arrays.lanes.num_instrs
    key, of_work = place * num_instrs + at, (at_place * num_instrs)[named]
    for computed in (work.forward, work.backward, work.weights):
        num_before = np.searchsorted(key, of_work + computed[named])
        # The last of an odd number is a gather: of this place, if all is well.
        if (num_before % 2 == 0).any() or (place[num_before - 1] != at_place[named]).any():
            return False
    return True
