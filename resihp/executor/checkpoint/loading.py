"""Reads a rank's shards of any layout from a version that was saved in any other.

`torch.distributed.checkpoint` tells which part of which saved chunk goes where. A chunk is read
whole into memory of its checked size, hashed, and only then copied from.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from resihp.checkpoint.disk import Folder, open_folder
from resihp.checkpoint.manifest import Chunk, Manifest, data_name
from resihp.checkpoint.versions import chunk_places, read_chunk, read_manifest, read_parts
from resihp.errors import CheckpointRefused, OtherModel
from resihp.executor.adamw import AdamW, AdamWConfig
from resihp.executor.checkpoint.pieces import KINDS, all_keys, box_of, key_of
from resihp.executor.flat import bytes_of
from resihp.executor.model import Model
from resihp.executor.state import Holding, empty_optimizer, holding_of
from resihp.ir.program import Program

__all__ = ["Loaded", "VersionReader", "load_holding"]


class Loaded(NamedTuple):
    """A rank's shards as they were saved, and what they are of."""

    holding: Holding
    manifest: Manifest
    num_bytes: int
    """Read from disk."""


class _Place(NamedTuple):
    """Where a saved chunk is."""

    rank: int
    at: int
    chunk: Chunk


def load_holding(
    model: Model,
    config: AdamWConfig,
    program: Program,
    version: Path,
    device: torch.device | str = "cpu",
) -> Loaded:
    """The shards of `program`'s layers from the version in directory `version`.

    CheckpointRefused where it is not complete or damaged, OtherModel where it is of another model.
    """
    reader = VersionReader(version)
    metadata = reader.read_metadata()
    _check_model(model, metadata, version)
    host = empty_optimizer(model, config, program)
    planner = _Planner(model, program, (host.parameters, host.exp_avg, host.exp_avg_sq))
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
    parameters, exp_avg, exp_avg_sq = (
        {name: tensor.to(device) for name, tensor in kind.items()} for kind in planner.shards
    )
    updates = reader.manifest.updates
    optimizer = AdamW(config, parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, num_steps=updates)
    return Loaded(holding_of(program, optimizer), reader.manifest, reader.num_bytes)


def _check_model(model: Model, metadata: Metadata, version: Path) -> None:
    saved = {
        key: tuple(tensor.size)
        for key, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    wanted = all_keys(model)
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            there, here = (
                "missing" if shape is None else f"of shape {list(shape)}"
                for shape in (saved.get(key), wanted.get(key))
            )
            raise OtherModel(
                f"{version} is of another model: {key} is {there} in it, and {here} in this job"
            )


class _Planner(LoadPlanner):
    """Where the pieces go: into `shards` of one rank, on the host."""

    def __init__(
        self, model: Model, program: Program, shards: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._model = model
        self._program = program
        self.shards = shards
        self._targets: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `LoadPlanner`."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """See `LoadPlanner`. Both sides of a tied pair are read from the side that was saved."""
        items: list[ReadItem] = []
        for kind, shards in enumerate(self.shards):
            for name, shard in shards.items():
                key = key_of(self._model, kind, name)
                where = self._program.tp, self._program.tp_index
                offsets, sizes = box_of(self._model.layout(name), *where)
                box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                saved = self._metadata.state_dict_metadata[key]
                assert isinstance(saved, TensorStorageMetadata)
                target = MetadataIndex(f"{KINDS[kind]}.{name}", offsets)
                self._targets[target] = shard
                items += [
                    replace(item, dest_index=target)
                    for item in create_read_items_for_chunk_list(key, saved, [box])
                ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """See `LoadPlanner`."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """See `LoadPlanner`."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Not ours: nothing but tensors is saved."""
        raise NotImplementedError(read_item.dest_index.fqn)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """See `LoadPlanner`."""
        shard = self._targets[read_item.dest_index]
        return _box(shard, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See `LoadPlanner`; what was resolved is a view."""


class VersionReader(StorageReader):
    """Reads a complete version; also for torch's own `load`, with `no_dist=True`."""

    def __init__(self, version: Path) -> None:
        self._version = version
        self._places: dict[MetadataIndex, _Place] = {}
        self.num_bytes = 0
        self.manifest: Manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `StorageReader`. CheckpointRefused where the version is not complete and whole."""
        try:
            with self._open() as folder:
                self.manifest = read_manifest(folder)
                parts = read_parts(folder, self.manifest)
        except OSError as error:
            raise CheckpointRefused(f"{self._version}: {error.strerror}") from error
        tensors: dict[str, TensorStorageMetadata] = {}
        for rank, part in parts.items():
            for chunk, at, _ in chunk_places(part):
                self._places[MetadataIndex(chunk.tensor, chunk.offsets)] = _Place(rank, at, chunk)
                tensor = tensors.setdefault(
                    chunk.tensor,
                    TensorStorageMetadata(
                        TensorProperties(dtype=torch.float32),
                        torch.Size(part.tensors[chunk.tensor].shape),
                        [],
                    ),
                )
                tensor.chunks.append(
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                )
        return Metadata({**tensors})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`; `read_metadata` did it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader`. CheckpointRefused names the first chunk that is damaged."""
        of_file: dict[int, dict[_Place, list[ReadItem]]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            of_file.setdefault(place.rank, {}).setdefault(place, []).append(item)
        with self._open() as folder:
            for rank, chunks in sorted(of_file.items()):
                with folder.reading(data_name(rank)) as file:
                    for place in sorted(chunks, key=lambda each: each.at):
                        where = str(folder.path / data_name(rank))
                        _fill(self._read(file, place, where), chunks[place], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def _open(self) -> Generator[Folder]:
        """The version's directory, which must be none by a link."""
        with (
            open_folder(self._version.parent) as parent,
            parent.inside(self._version.name) as folder,
        ):
            yield folder

    def _read(self, file: int, place: _Place, where: str) -> Tensor:
        chunk = place.chunk
        read = torch.empty(chunk.sizes)
        read_chunk(file, chunk, place.at, bytes_of(read), where)
        self.num_bytes += read.nbytes
        return read

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader`; one reader reads one version."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageReader`: a directory that is there."""
        return os.path.isdir(checkpoint_id)


def _fill(saved: Tensor, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        target = planner.resolve_tensor(item)
        target.copy_(_box(saved, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _box(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
