"""Which boxes of which logical tensors a rank holds, as `torch.distributed.checkpoint` names them.

A logical tensor is saved three times: the parameter and both moments. The output side of a tied
pair is not saved: it equals the input side to the bit, and is loaded from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from resihp.executor.layouts import TensorLayout, shard_units
from resihp.executor.model import Model, tensors_of
from resihp.ir.model import Plan
from resihp.ir.reshard import chunks_of_member

__all__ = ["KINDS", "Piece", "all_keys", "box_of", "key_of", "pieces_of_rank", "write_item"]

KINDS = ("parameters", "exp_avg", "exp_avg_sq")
"""In the order of `Holding.kinds`."""


class Piece(NamedTuple):
    """One box that a rank holds: chunk `chunk` of its shard of tensor `name`."""

    key: str
    name: str
    kind: int
    chunk: int
    num_chunks: int


def key_of(model: Model, kind: int, name: str) -> str:
    """Under which a tensor is saved."""
    saved_as = {output: into for into, output in model.tied}
    return f"{KINDS[kind]}.{saved_as.get(name, name)}"


def all_keys(model: Model) -> dict[str, tuple[int, ...]]:
    """Every key of a whole version, with the tensor's shape."""
    names = model.tensors(0, model.num_layers - 1)
    return {
        key_of(model, kind, name): tuple(model.layout(name).shape)
        for kind in range(len(KINDS))
        for name in names
    }


def pieces_of_rank(model: Model, plan: Plan, rank: int) -> Iterator[Piece]:
    """What `rank` holds in `plan`, cut so that holders of other degrees hold the same boxes.

    Boxes come twice where the rank holds copies of one unit, or both sides of a tied pair.
    """
    num_chunks = max(group.tp for group in plan.groups)
    for group in plan.groups:
        if rank not in group.ranks:
            continue
        mine = chunks_of_member(group.ranks.index(rank), group.tp, num_chunks)
        for name in tensors_of(model, group.layers):
            chunks: Iterable[int] = [0] if model.layout(name).dim is None else mine
            for kind in range(len(KINDS)):
                key = key_of(model, kind, name)
                yield from (Piece(key, name, kind, chunk, num_chunks) for chunk in chunks)


def box_of(
    layout: TensorLayout, degree: int, index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of shard `index` of `degree` in the whole tensor."""
    offsets, sizes = [0] * len(layout.shape), list(layout.shape)
    if layout.dim is not None:
        start, end = shard_units(layout.units, degree, index)
        length = layout.shape[layout.dim] // layout.units
        offsets[layout.dim], sizes[layout.dim] = start * length, (end - start) * length
    return tuple(offsets), tuple(sizes)


def write_item(model: Model, piece: Piece) -> WriteItem:
    """The piece as an item of a save plan. Copies of one box have equal indices."""
    layout = model.layout(piece.name)
    offsets, sizes = box_of(layout, piece.num_chunks, piece.chunk)
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(piece.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=box,
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(layout.shape),
        ),
    )
