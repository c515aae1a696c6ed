"""What a saved version says of itself, as bounded JSON, and the proof that it is whole.

    DIR/step-00000120-5f3a91c2-g3/
        part-00004.data      raw bytes of chunks, one after the other, no gaps
        part-00004.json      `Part`: which chunks of which tensors they are, each with its SHA-256
        manifest.json        `Manifest`: the step, the data's position, and every part's hash
        complete             `Marker`: the hash of manifest.json; written last

So whoever trusts the marker can check every byte below it. Nothing of it is code, no name in it
is a path, and all sizes are compared with the files' before memory is taken.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from resihp.errors import CheckpointRefused

__all__ = [
    "COMPLETE",
    "DTYPE_BYTES",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "MAX_PART_BYTES",
    "Chunk",
    "Manifest",
    "Marker",
    "Part",
    "PartFile",
    "Position",
    "TensorEntry",
    "check_whole",
    "chunk_bytes",
    "data_name",
    "decode",
    "encode",
    "part_name",
    "sha256",
]

COMPLETE = "complete"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_PART_BYTES = 64 << 20
MAX_DIMS = 8
DTYPE_BYTES = {"fp32": 4}

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Extent = Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]
Rank = Annotated[int, Meta(ge=0, le=99_999)]
Step = Annotated[int, Meta(ge=0, le=1 << 40)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_T = TypeVar("_T")


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is read from disk."""


class TensorEntry(_Document, frozen=True, kw_only=True):
    """A logical tensor: whole, whatever the layout it was saved from."""

    dtype: Literal["fp32"] = "fp32"
    shape: Extent


class Chunk(_Document, frozen=True, kw_only=True):
    """A box of one tensor, in row-major order; it differs from the whole in one dim at most."""

    tensor: Name
    offsets: Extent
    sizes: Extent
    sha256: Digest


class Part(_Document, frozen=True, kw_only=True):
    """What one rank wrote: `chunks` lie one after the other in its data file."""

    format: Literal[1] = 1
    step: Step
    num_tensors: Size
    """Of the whole state, parameters and moments."""
    tensors: Annotated[dict[Name, TensorEntry], Meta(max_length=1 << 20)]
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=1 << 20)]

    @property
    def num_bytes(self) -> int:
        """Of the data file; CheckpointRefused where a chunk is of no tensor."""
        return sum(chunk_bytes(self, chunk) for chunk in self.chunks)


class PartFile(_Document, frozen=True, kw_only=True):
    """One part, by the rank that wrote it."""

    rank: Rank
    part_bytes: Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]
    part_sha256: Digest
    data_bytes: Size


class Position(_Document, frozen=True, kw_only=True):
    """Where the data is: which samples a step reads is a function of these and the step."""

    dataset: Annotated[str, Meta(max_length=256)]
    """Digest of the text."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    tokens: Size
    """Per micro-batch."""
    num_microbatches: Size
    """Of the global batch."""


class Manifest(_Document, frozen=True, kw_only=True):
    """A whole version."""

    format: Literal[1] = 1
    step: Step
    """Completed steps."""
    updates: Step
    """Optimizer updates by then."""
    loss: float | None
    """Of the last step; None where nothing finite is known."""
    position: Position
    run: Annotated[str, Meta(max_length=256)]
    generation: Step
    parts: Annotated[tuple[PartFile, ...], Meta(min_length=1, max_length=1 << 14)]

    @property
    def data_bytes(self) -> int:
        """Of all parts."""
        return sum(part.data_bytes for part in self.parts)


class Marker(_Document, frozen=True, kw_only=True):
    """The version is complete: all else was on disk before this."""

    format: Literal[1] = 1
    manifest_bytes: Annotated[int, Meta(ge=1, le=MAX_MANIFEST_BYTES)]
    manifest_sha256: Digest


def data_name(rank: int) -> str:
    """File of the chunks that `rank` wrote."""
    return f"part-{rank:05}.data"


def part_name(rank: int) -> str:
    """File that says what they are."""
    return f"part-{rank:05}.json"


def sha256(raw: bytes | memoryview) -> str:
    """Digest in hex."""
    return hashlib.sha256(raw).hexdigest()


def encode(document: _Document) -> bytes:
    """As it is written."""
    return msgspec.json.encode(document) + b"\n"


def decode(raw: bytes, kind: type[_T], where: str) -> _T:
    """A document of `where`; CheckpointRefused where it is none of its schema."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointRefused(f"{where}: {error}") from error


def chunk_bytes(part: Part, chunk: Chunk) -> int:
    """Bytes of a chunk; CheckpointRefused where its tensor is not named or the box is not in it."""
    tensor = part.tensors.get(chunk.tensor)
    if tensor is None:
        raise CheckpointRefused(f"a chunk of {chunk.tensor!r}, which is none of its tensors")
    if not len(tensor.shape) == len(chunk.offsets) == len(chunk.sizes):
        raise CheckpointRefused(f"a chunk of {chunk.tensor!r} has other dims than the tensor")
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True):
        if size < 1 or offset + size > whole:
            raise CheckpointRefused(f"a chunk of {chunk.tensor!r} is not inside the tensor")
    return math.prod(chunk.sizes) * DTYPE_BYTES[tensor.dtype]


def check_whole(parts: Iterable[Part], step: int) -> None:
    """Prove that the parts make up one state: CheckpointRefused where they do not.

    All are of `step` and say the same of every tensor, and each element is there once.
    """
    tensors: dict[str, TensorEntry] = {}
    chunks: dict[str, list[Chunk]] = {}
    nums: set[int] = set()
    for part in parts:
        if part.step != step:
            raise CheckpointRefused(f"a part is of step {part.step}, not of step {step}")
        nums.add(part.num_tensors)
        for name, tensor in part.tensors.items():
            if tensors.setdefault(name, tensor) != tensor:
                raise CheckpointRefused(f"two parts differ about the shape of {name!r}")
        for chunk in part.chunks:
            chunk_bytes(part, chunk)
            chunks.setdefault(chunk.tensor, []).append(chunk)
    if nums != {len(tensors)}:
        raise CheckpointRefused(f"{len(tensors)} tensors in the parts, {sorted(nums)} were meant")
    for name, tensor in tensors.items():
        _check_tiled(name, tensor.shape, chunks.get(name, []))


def _check_tiled(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Each element is in one chunk: runs along one dim that follow each other."""
    cut = {
        dim
        for chunk in chunks
        for dim, (size, whole) in enumerate(zip(chunk.sizes, shape, strict=True))
        if size != whole
    }
    if len(cut) > 1:
        raise CheckpointRefused(f"{name!r} is cut along more than one dim")
    if not cut:
        if len(chunks) != 1:
            raise CheckpointRefused(f"{name!r} is there {len(chunks)} times")
        return
    dim = cut.pop()
    at = 0
    for offset, size in sorted((chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks):
        if offset != at:
            what = "is missing" if offset > at else "is there twice"
            raise CheckpointRefused(f"{name!r}: what is at {min(at, offset)} of dim {dim} {what}")
        at += size
    if at != shape[dim]:
        raise CheckpointRefused(f"{name!r}: what is at {at} of dim {dim} is missing")
