"""Checksums of tensors that add up over shards, so that different layouts can be compared.

The element with index i of the whole tensor, its bits as the number b, counts b * (i + 1); all is
added modulo 2^64. Every change of one element changes the sum (b and i are below 2^32 each), and so
do exchanged elements. Sums of disjoint shards add up to that of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from resihp.executor.layouts import TensorLayout

__all__ = ["SUM_BYTES", "opened_parcel", "sealed_parcel", "shard_sum"]

SUM_BYTES = 8
_PIECE = 1 << 17
"""Elements that are summed at a time: their 64-bit numbers stay in the cache."""
_WIDTH = 256
"""Of the rows that a long run is cut into."""


def shard_sum(shard: Tensor, layout: TensorLayout, start: int) -> Tensor:
    """The part of the tensor's sum that `shard` (fp32) adds: an int64 scalar on its device.

    The shard has the indices from `start` on of the dim that is cut.
    """
    if layout.dim is None:
        return _sum_of_runs(shard.reshape(1, -1), 0, 0)
    shape, dim = layout.shape, layout.dim
    inner = _product(shape[dim + 1 :])
    runs = shard.reshape(_product(shape[:dim]), -1)  # each contiguous in the whole tensor
    return _sum_of_runs(runs, start * inner, shape[dim] * inner)


def _sum_of_runs(runs: Tensor, first: int, stride: int) -> Tensor:
    """Of rows that begin at the indices first, first + stride, ..."""
    num_runs, length = runs.shape
    if num_runs == 1 and length > _WIDTH:
        whole = length - length % _WIDTH
        rows = runs[:, :whole].reshape(-1, _WIDTH)
        return _sum_of_runs(rows, first, _WIDTH) + _sum_of_runs(runs[:, whole:], first + whole, 0)
    total = torch.zeros((), dtype=torch.int64, device=runs.device)
    wide = min(length, _PIECE)
    if wide == 0:
        return total
    high = max(1, _PIECE // wide)
    for top in range(0, num_runs, high):
        for left in range(0, length, wide):
            piece = runs[top : top + high, left : left + wide]
            total += _sum_of_piece(piece, first + left + top * stride, stride)
    return total


def _sum_of_piece(piece: Tensor, first: int, stride: int) -> Tensor:
    """By the sums of its rows and columns: there are few of them to multiply."""
    bits = piece.contiguous().view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    num_rows, num_columns = bits.shape
    by_column = torch.arange(first + 1, first + 1 + num_columns, device=bits.device)
    total = (by_column * bits.sum(dim=0)).sum()
    if num_rows > 1:
        by_row = torch.arange(0, num_rows * stride, stride, device=bits.device)
        total += (by_row * bits.sum(dim=1)).sum()
    return total


def sealed_parcel(parts: Sequence[Tensor]) -> Tensor:
    """Flat fp32 tensors, one after the other, and the checksum of all in two more elements."""
    room = torch.zeros(SUM_BYTES // 4, dtype=torch.float32, device=parts[0].device)
    flat = torch.cat([*parts, room])
    end = len(flat) - len(room)
    flat[end:] = _sum_of_runs(flat[:end].view(1, -1), 0, 0).view(1).view(torch.float32)
    return flat


def opened_parcel(flat: Tensor) -> Tensor | None:
    """What a sealed parcel carries; None where it is not what was sealed."""
    end = len(flat) - SUM_BYTES // 4
    told = flat[end:].clone().view(torch.int64)
    return flat[:end] if bool((_sum_of_runs(flat[:end].view(1, -1), 0, 0) == told).all()) else None


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
