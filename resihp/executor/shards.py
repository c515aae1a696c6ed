"""One member's shards of a stage as the flat vectors that its reduction groups sum, and back.

With N chunks (the largest TP degree among the replicas of the stage), group c sums chunk c of
every tensor that is cut, and replicated tensors whole.

**Copies.** Where a tensor has fewer units than N, the chunks of one unit are copies, and a
replica's members may hold copies, each with a part of the gradient. A member puts what it has
into the first of its chunks of the unit and zeros into the others; the gradient is then the sum
of the chunks of the unit, in their order. So nothing is counted twice, whatever the degrees, and
between equal degrees the bits depend on the copies' order only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from resihp.executor.flat import split_flat
from resihp.executor.layouts import local_shape, num_copies, shard_units, slice_of
from resihp.ir.reshard import chunks_of_member

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from resihp.executor.device.interface import Communicator
    from resihp.executor.model import Model

__all__ = ["StageShards"]

_BUCKET = 1 << 24
"""Elements that are exchanged at a time, but for larger tensors: what the copies made for an
exchange hold is small beside the gradients themselves."""


class StageShards:
    """Tensors `names` on member `index` of `degree`, cut into `num_chunks` for reduction."""

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        num_chunks: int,
        degree: int,
        index: int,
        device: torch.device | str = "cpu",
    ) -> None:
        layouts = {name: model.layout(name) for name in sorted(names)}
        self.num_chunks = num_chunks
        self.chunks = chunks_of_member(index, degree, num_chunks)
        self._where = degree, index
        self._layouts = layouts
        self.device = device
        self.replicated = [name for name in layouts if layouts[name].dim is None]
        self.copied = [name for name in layouts if num_copies(layouts[name], num_chunks) > 1]
        self.cut = [name for name in layouts if name not in {*self.replicated, *self.copied}]
        self._has_remote_copies = any(num_copies(layouts[name], degree) > 1 for name in self.copied)

    def empty(self) -> dict[str, Tensor]:
        """Uninitialised fp32 tensors of the local shapes."""
        return {
            name: torch.empty(local_shape(layout, *self._where), device=self.device)
            for name, layout in self._layouts.items()
        }

    def flat_buffer(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One flat fp32 tensor and its views as local shards: cut ones first, replicated last."""
        names = (*self.cut, *self.copied, *self.replicated)
        shapes = [local_shape(self._layouts[name], *self._where) for name in names]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), device=self.device)
        parts = zip(names, split_flat(flat, sizes), shapes, strict=True)
        return flat, {name: part.view(shape) for name, part, shape in parts}

    def buckets(self, names: Iterable[str]) -> list[list[str]]:
        """`names` in runs that are exchanged one after the other, then all copied tensors.

        All members of a reduction group cut alike.
        """
        found: list[list[str]] = []
        size = _BUCKET
        for name in names:
            layout = self._layouts[name]
            length = math.prod(layout.shape) // (1 if layout.dim is None else self.num_chunks)
            if size + length > _BUCKET:
                found.append([])
                size = 0
            found[-1].append(name)
            size += length
        return [*found, self.copied] if self.copied else found

    def length(self, names: Sequence[str], chunk: int) -> int:
        """Elements of what `flatten` gives, without padding."""
        where = self.num_chunks, chunk
        return sum(math.prod(local_shape(self._layouts[name], *where)) for name in names)

    def flatten(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], chunk: int, padded_to: int = 1
    ) -> Tensor:
        """Chunk `chunk` of one bucket; zeros up to a multiple."""
        parts = [
            view.reshape(-1) if self._counts(name, chunk) else view.new_zeros(view.numel())
            for name, view in zip(names, self._views(tensors, names, chunk), strict=True)
        ]
        rest = -sum(part.numel() for part in parts) % padded_to
        if rest:
            parts.append(parts[0].new_zeros(rest))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unflatten(
        self,
        flats: Mapping[int, Tensor],
        names: Sequence[str],
        into: Mapping[str, Tensor],
        gather: Communicator,
    ) -> None:
        """Write what the groups of all our chunks summed of one bucket, unpadded, into `into`.

        `gather` is the TP group, asked only where members hold copies of each other.
        """
        if names is self.copied:
            self._join_copies(torch.stack(list(flats.values())), into, gather)
            return
        for chunk, flat in flats.items():
            views = self._views(into, names, chunk)
            parts = split_flat(flat, [view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view(view.shape))

    def _views(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], chunk: int
    ) -> list[Tensor]:
        return [
            slice_of(self._layouts[name], tensors[name], chunk, self.num_chunks, *self._where)
            for name in names
        ]

    def _counts(self, name: str, chunk: int) -> bool:
        """Whether `chunk` is the first that we hold of its unit; always, without copies."""
        copies = num_copies(self._layouts[name], self.num_chunks)
        return chunk == max(chunk // copies * copies, self.chunks.start)

    def _join_copies(self, sums: Tensor, into: Mapping[str, Tensor], gather: Communicator) -> None:
        """Add up the chunks of each unit; `sums` has one row for each of our chunks."""
        first = self.chunks.start
        if self._has_remote_copies:
            sums, first = gather.all_gather(sums).view(self.num_chunks, -1), 0
        sizes = [view.numel() for view in self._views(into, self.copied, self.chunks.start)]
        for name, columns in zip(self.copied, torch.split(sums, sizes, dim=1), strict=True):
            layout = self._layouts[name]
            copies = num_copies(layout, self.num_chunks)
            for unit in range(*shard_units(layout.units, *self._where)):
                total = columns[unit * copies - first].clone()
                for chunk in range(unit * copies + 1, (unit + 1) * copies):
                    total += columns[chunk - first]
                here = max(unit * copies, self.chunks.start)
                (view,) = self._views(into, [name], here)
                view.copy_(total.view(view.shape))
