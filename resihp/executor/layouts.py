"""How a tensor is cut over the members of a TP group, and into the chunks that move.

Along its shard dim a tensor is a row of `units`: runs that are never cut, such as heads. Member i
of k holds the units

    i * units // k  ..  max(i * units // k + 1, (i + 1) * units // k) - 1

so the shards are near-equal where the units do not divide, and where there are more members than
units (key/value heads at a high TP degree) neighbours hold **copies** of one unit. Chunk c of N is
cut by the same rule, with N a power of two and at least the degree; then member i of k holds chunk
c exactly if c * k // N == i, and every chunk lies inside one shard of any layout of degree ≤ N.
Chunks may be copies too: whoever moves or hashes them does so once for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TensorLayout",
    "cuts_evenly",
    "holds",
    "local_shape",
    "local_shard",
    "num_copies",
    "shard_units",
    "slice_of",
]


class TensorLayout(NamedTuple):
    """Shape of a whole tensor and where tensor parallelism may cut it."""

    shape: tuple[int, ...]
    dim: int | None
    """The dim that is cut; None: every member holds the whole tensor."""
    units: int
    """Equal runs along `dim` that stay whole; 1 where `dim` is None."""


def cuts_evenly(layout: TensorLayout, degree: int) -> bool:
    """Whether a group of `degree` members can hold the tensor.

    More units than members are cut into near-equal runs; fewer must divide the members, so that
    each unit has equally many copies.
    """
    return layout.dim is None or layout.units >= degree or degree % layout.units == 0


def num_copies(layout: TensorLayout, degree: int) -> int:
    """Members that hold each unit of a sharded tensor, neighbours; 1 unless units are short.

    The gradient that each of them computes is a part: that of its own share of what reads it.
    """
    if layout.dim is None or layout.units >= degree:
        return 1
    return degree // layout.units


def shard_units(units: int, degree: int, index: int) -> tuple[int, int]:
    """First unit of shard `index` of `degree`, and the one after its last."""
    assert units >= degree or degree % units == 0, f"{units} units over {degree} members"
    start = index * units // degree
    return start, max(start + 1, (index + 1) * units // degree)


def local_shape(layout: TensorLayout, degree: int, index: int) -> tuple[int, ...]:
    """Shape of member `index`'s shard at TP degree `degree`."""
    shape, dim, units = layout
    if dim is None:
        return shape
    start, end = shard_units(units, degree, index)
    return (*shape[:dim], (end - start) * (shape[dim] // units), *shape[dim + 1 :])


def holds(layout: TensorLayout, chunk: int, num_chunks: int, degree: int, index: int) -> bool:
    """Whether member `index` of `degree` holds chunk `chunk`; of a replicated tensor all do."""
    return layout.dim is None or chunk * degree // num_chunks == index


def slice_of(
    layout: TensorLayout,
    tensor: Tensor,
    chunk: int,
    num_chunks: int,
    degree: int = 1,
    index: int = 0,
) -> Tensor:
    """Chunk `chunk` of `num_chunks` of the whole tensor, as a view of member `index`'s shard.

    `tensor` is the shard at `degree` (1: the whole tensor) and the member must hold the chunk.
    Of a replicated tensor, which is not cut, it is all of it.
    """
    assert 0 <= chunk < num_chunks, f"chunk {chunk} of {num_chunks}"
    assert holds(layout, chunk, num_chunks, degree, index), f"{chunk}: not on member {index}"
    dim = layout.dim
    if dim is None:
        return tensor
    begin, end = shard_units(layout.units, degree, index)
    start, stop = shard_units(layout.units, num_chunks, chunk)
    assert begin <= start < stop <= end, f"{layout.units} units: {num_chunks} over {degree}"
    length = layout.shape[dim] // layout.units
    return tensor.narrow(dim, (start - begin) * length, (stop - start) * length)


def local_shard(layout: TensorLayout, whole: Tensor, degree: int, index: int) -> Tensor:
    """Member `index`'s own contiguous copy of its shard of the whole tensor."""
    part = slice_of(layout, whole, index, degree)
    return part.clone(memory_format=torch.contiguous_format)
