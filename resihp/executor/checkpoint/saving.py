"""One rank's part of a version: who writes which box, a copy of them, and the files.

Every rank derives the same division of the whole state from the plan, with the planner's rule of
`torch.distributed.checkpoint` (of all holders of a box the one with least to write), so nothing is
negotiated and no collective runs. The copy is taken at once; the files are written from it while
training goes on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from resihp.checkpoint.disk import Disk, Folder, open_folder
from resihp.checkpoint.manifest import (
    Chunk,
    Part,
    PartFile,
    TensorEntry,
    data_name,
    encode,
    part_name,
    sha256,
)
from resihp.executor.checkpoint.pieces import Piece, pieces_of_rank, write_item
from resihp.executor.flat import bytes_of
from resihp.executor.layouts import slice_of
from resihp.executor.model import Model
from resihp.executor.state import Holding
from resihp.ir.model import Plan

__all__ = ["Division", "PartWriter", "Share", "write_part"]


class Share(NamedTuple):
    """What one rank writes of every version of one layout."""

    plan: SavePlan
    pieces: tuple[Piece, ...]
    """Where each item of the plan comes from."""

    @torch.no_grad()
    def copy(self, model: Model, holding: Holding) -> dict[MetadataIndex, Tensor]:
        """The boxes as they are now, on the host."""
        where = holding.program.tp, holding.program.tp_index
        kinds = holding.kinds()
        return {
            item.index: slice_of(
                model.layout(piece.name),
                kinds[piece.kind][piece.name],
                piece.chunk,
                piece.num_chunks,
                *where,
            )
            .detach()
            .to("cpu", copy=True)
            .contiguous()
            for item, piece in zip(self.plan.items, self.pieces, strict=True)
        }


class Division:
    """Who writes what of a layout in which only `alive` ranks of the plan are left."""

    def __init__(self, model: Model, plan: Plan, alive: Sequence[int] | None = None) -> None:
        ranks = plan.active_ranks if alive is None else set(alive) & set(plan.active_ranks)
        self.ranks = tuple(sorted(ranks))
        self._pieces = [_items(model, plan, rank) for rank in self.ranks]
        planner = _Planner({})
        plans = [SavePlan([item for item, _ in pieces]) for pieces in self._pieces]
        self._plans, self.metadata = planner.create_global_plan(plans)

    def share(self, rank: int) -> Share:
        """What `rank` writes."""
        at = self.ranks.index(rank)
        source = {item.index: piece for item, piece in self._pieces[at]}
        plan = self._plans[at]
        return Share(plan, tuple(source[item.index] for item in plan.items))


def _items(model: Model, plan: Plan, rank: int) -> list[tuple[WriteItem, Piece]]:
    """Each box once."""
    found: dict[MetadataIndex, tuple[WriteItem, Piece]] = {}
    for piece in pieces_of_rank(model, plan, rank):
        item = write_item(model, piece)
        found.setdefault(item.index, (item, piece))
    return list(found.values())


class _Planner(DefaultSavePlanner):
    """torch's division and checks of a global plan; the data are copies that are at hand."""

    def __init__(self, copies: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `SavePlanner`; there is nothing to set up."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See `SavePlanner`."""
        return self._copies[write_item.index]


class PartWriter(StorageWriter):
    """Writes the items of one rank as a part (`resihp.checkpoint.manifest`).

    `write_data` needs no other rank, and `finish` is not for it: the coordinator completes a
    version. `go_on` is asked before each chunk and raises where the save is to be given up.
    """

    def __init__(self, folder: Folder, rank: int, go_on: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._rank = rank
        self._go_on = go_on

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`. The data file is on disk when this returns; OSError if it is not."""
        results: list[WriteResult] = []
        blocks = self._blocks(plan, planner, results)
        self._folder.write_new(data_name(self._rank), blocks)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _blocks(
        self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]
    ) -> Iterator[memoryview]:
        for item in plan.items:
            self._go_on()
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            block = bytes_of(tensor)
            results.append(WriteResult(item.index, block.nbytes, sha256(block)))
            yield block

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter`; one writer writes one part."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`; nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See `StorageWriter`."""
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Not ours (see the class)."""
        raise NotImplementedError("a version is completed by `resihp.checkpoint.versions.complete`")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageWriter`: a directory that is there."""
        return os.path.isdir(checkpoint_id)


def write_part(
    directory: Path,
    name: str,
    rank: int,
    step: int,
    share: Share,
    copies: Mapping[MetadataIndex, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    go_on: Callable[[], None] = lambda: None,
    disk: Disk | None = None,
) -> PartFile:
    """Write this rank's part of version `name`, on disk before this returns.

    `shapes` are those of the whole state (`all_keys`). The version's directory is made where it is
    not there, and so is `directory`, but not what that is in. OSError where the disk is at fault,
    and what `go_on` raises; no half file stays.
    """
    if not directory.exists():
        with open_folder(directory.parent, disk) as above:
            above.make(directory.name)
    with open_folder(directory, disk) as parent:
        parent.make(name)
        with parent.inside(name) as folder:
            writer = PartWriter(folder, rank, go_on)
            results = writer.write_data(share.plan, _Planner(copies)).wait()
            part = _part(step, share.plan, results, shapes)
            raw = encode(part)
            try:
                go_on()
                folder.write_new(part_name(rank), [raw])
            except BaseException:
                folder.unlink(data_name(rank))  # of no use, and the disk may be full
                raise
            folder.sync()
    return PartFile(
        rank=rank, part_bytes=len(raw), part_sha256=sha256(raw), data_bytes=part.num_bytes
    )


def _part(
    step: int, plan: SavePlan, results: list[WriteResult], shapes: Mapping[str, tuple[int, ...]]
) -> Part:
    chunks: list[Chunk] = []
    for item, result in zip(plan.items, results, strict=True):
        data = item.tensor_data
        assert data is not None
        chunks.append(
            Chunk(
                tensor=item.index.fqn,
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
                sha256=result.storage_data,
            )
        )
    tensors = {chunk.tensor: TensorEntry(shape=shapes[chunk.tensor]) for chunk in chunks}
    return Part(step=step, num_tensors=len(shapes), tensors=tensors, chunks=tuple(chunks))
