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
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from resihp.executor.device.interface import Communicator
    from resihp.executor.model import Model

__all__ = ["StageShards"]


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
        self.has_remote_copies = any(num_copies(layouts[name], degree) > 1 for name in self.copied)

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

    def length(self, chunk: int, names: Sequence[str]) -> int:
        """Elements of what `flatten` gives, without padding."""
        where = self.num_chunks, chunk
        return sum(
            math.prod(local_shape(self._layouts[name], *where)) for name in (*names, *self.copied)
        )

    def flatten(
        self, tensors: Mapping[str, Tensor], chunk: int, *, names: Sequence[str], padded_to: int = 1
    ) -> Tensor:
        """Chunk `chunk` of `names`, then of all copied tensors; zeros up to a multiple."""
        parts = [view.reshape(-1) for view in self._views(tensors, names, chunk)]
        for name, view in zip(self.copied, self._views(tensors, self.copied, chunk), strict=True):
            counts = chunk == self._first_chunk(name, chunk)
            parts.append((view if counts else torch.zeros_like(view)).reshape(-1))
        rest = -sum(part.numel() for part in parts) % padded_to
        if rest or not parts:
            parts.append(torch.zeros(rest, device=self.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unflatten(
        self,
        flats: Mapping[int, Tensor],
        into: Mapping[str, Tensor],
        gather: Communicator,
        *,
        names: Sequence[str],
    ) -> None:
        """Write what the groups of all our chunks summed, without padding, into `into`.

        `gather` is the TP group, asked only where members hold copies of each other.
        """
        sums_of_copies: list[Tensor] = []
        for chunk, flat in flats.items():
            views = self._views(into, names, chunk)
            copies = self._views(into, self.copied, chunk)
            sizes = [view.numel() for view in (*views, *copies)]
            parts = split_flat(flat, sizes)
            for view, part in zip(views, parts, strict=False):
                view.copy_(part.view(view.shape))
            sums_of_copies += parts[len(views) :]
        if self.copied:
            self._join_copies(sums_of_copies, into, gather)

    def _views(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], chunk: int
    ) -> list[Tensor]:
        return [
            slice_of(self._layouts[name], tensors[name], chunk, self.num_chunks, *self._where)
            for name in names
        ]

    def _first_chunk(self, name: str, chunk: int) -> int:
        """The first chunk of the same unit that we hold."""
        copies = num_copies(self._layouts[name], self.num_chunks)
        return max(chunk // copies * copies, self.chunks.start)

    def _join_copies(
        self, sums: list[Tensor], into: Mapping[str, Tensor], gather: Communicator
    ) -> None:
        """Add up the chunks of each unit; `sums` are those of our chunks, chunk by chunk."""
        row = torch.cat(sums).view(len(self.chunks), -1)
        first = self.chunks.start
        if self.has_remote_copies:
            row, first = gather.all_gather(row).view(self.num_chunks, -1), 0
        sizes = [sums[at].numel() for at in range(len(self.copied))]
        for name, columns in zip(self.copied, torch.split(row, sizes, dim=1), strict=True):
            layout = self._layouts[name]
            copies = num_copies(layout, self.num_chunks)
            for unit in range(*shard_units(layout.units, *self._where)):
                chunks = range(unit * copies, (unit + 1) * copies)
                total = columns[chunks.start - first].clone()
                for chunk in chunks[1:]:
                    total += columns[chunk - first]
                here = max(chunks.start, self.chunks.start)
                (view,) = self._views(into, [name], here)
                view.copy_(total.view(view.shape))
