"""Overlapped pairs, and where what they do begins and ends."""

from __future__ import annotations

import numpy as np

from resihp.ir.arrays import Arrays, Ints
from resihp.ir.model import Op
from resihp.ir.verify.fast.grid import Work
from resihp.ir.verify.fast.messages import Tensors

__all__ = ["first_of_pairs", "prove_pairs"]


def first_of_pairs(arrays: Arrays) -> Ints:
    """Instructions that are to be overlapped with the next."""
    if not arrays.table.paired.any():
        return np.zeros(0, np.intp)
    return np.flatnonzero(arrays.table.paired[arrays.row])


def prove_pairs(arrays: Arrays, work: Work, tensors: tuple[Tensors, Tensors], first: Ints) -> bool:
    """Both compute, of different (stage, micro-batch), and neither uses the other's result."""
    if not len(first):
        return True
    table, row = arrays.table, arrays.row
    if int(first[-1]) + 1 == len(row) or (arrays.lane[first] != arrays.lane[first + 1]).any():
        return False
    if (table.op[row[first + 1]] > Op.BW).any() or table.paired[row[first + 1]].any():
        return False
    head = np.arange(len(row))
    head[first + 1] = first
    apart = (
        (work.forward, work.backward),
        (work.backward, work.weights),
        (work.forward, work.weights),
        *((kind.produce, kind.consume) for kind in tensors),
    )
    return not any(((head[one] == head[other]) & (one != other)).any() for one, other in apart)
