"""The file of one snapshot: a head, a manifest, and the bytes of all tensors.

    magic (8) | length of the manifest (8) | seal (32) | manifest | zeros to a page | tensors

The seal is SHA-256 over the manifest and one 64-bit sum of each block of the tensors' bytes; zeros
while the file is being written. It is written last, so a writer that is killed leaves a file
without one. Sums cost a tenth of what hashing all bytes would; they find every torn, truncated
or foreign file and each changed word, and are no defence against a forger, who would need this
user's rights.

Everything here is pure: it knows bytes, no files and no tensors.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

__all__ = [
    "BLOCK_WORDS",
    "HEAD_BYTES",
    "MAX_MANIFEST_BYTES",
    "NO_SEAL",
    "NUM_KINDS",
    "NUM_SLOTS",
    "Head",
    "Manifest",
    "Place",
    "block_sums",
    "decode_manifest",
    "encode_manifest",
    "pack_head",
    "places",
    "seal_of",
    "unpack_head",
]

MAGIC = b"RESIHPS1"
NUM_KINDS = 3
"""Parameters and both moments."""
NUM_SLOTS = 2
"""Files of one rank, which take turns."""
FP32_BYTES = 4
WORD_BYTES = 8
PAGE_BYTES = 4096
ALIGN_BYTES = 64
HEAD_BYTES = 48
SEAL_BYTES = 32
NO_SEAL = bytes(SEAL_BYTES)
BLOCK_WORDS = 1 << 15
"""Summed together right after they were copied: 256 KiB, which are still in the cache."""
MAX_MANIFEST_BYTES = 1 << 22

Size = Annotated[int, Meta(ge=0, le=1 << 40)]
Number = Annotated[int, Meta(ge=0, le=1 << 48)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=8)]
Name = Annotated[str, Meta(max_length=512)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot holds."""

    rank: Number
    """Whose state it is."""
    generation: Number
    """Whose layout it has."""
    version: Number
    """Completed steps."""
    updates: Number
    """Optimizer updates applied by then."""
    tensors: tuple[tuple[Name, Shape], ...]
    """Shards in the order of their bytes; `NUM_KINDS` of each, one after the other."""


class Head(NamedTuple):
    """The first bytes of a file."""

    manifest_bytes: int
    seal: bytes


class Place(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the beginning of the file."""
    num_elements: int


def pack_head(manifest_bytes: int, seal: bytes) -> bytes:
    """`HEAD_BYTES` bytes."""
    assert len(seal) == SEAL_BYTES
    return MAGIC + manifest_bytes.to_bytes(8, "little") + seal


def unpack_head(raw: bytes) -> Head | None:
    """None where it is not one of ours, or speaks of an absurd manifest."""
    if len(raw) < HEAD_BYTES or raw[:8] != MAGIC:
        return None
    size = int.from_bytes(raw[8:16], "little")
    return Head(size, raw[16:HEAD_BYTES]) if 0 < size <= MAX_MANIFEST_BYTES else None


def encode_manifest(manifest: Manifest) -> bytes:
    """As MessagePack."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(raw: bytes) -> Manifest | None:
    """None where it is none."""
    try:
        return msgspec.msgpack.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def places(manifest: Manifest, manifest_bytes: int) -> tuple[tuple[Place, ...], int, int]:
    """Every tensor's place, where the tensors begin, and the size of the whole file in bytes."""
    begin = _rounded(HEAD_BYTES + manifest_bytes, PAGE_BYTES)
    found: list[Place] = []
    offset = begin
    for name, shape in manifest.tensors:
        size = math.prod(shape)
        for kind in range(NUM_KINDS):
            found.append(Place(name, kind, shape, offset, size))
            offset += _rounded(size * FP32_BYTES, ALIGN_BYTES)
    return tuple(found), begin, offset


def block_sums(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One sum, modulo 2^64, of each block of `BLOCK_WORDS` (the last may be shorter)."""
    starts = range(0, len(words), BLOCK_WORDS)
    sums = (np.add.reduce(words[at : at + BLOCK_WORDS]) for at in starts)
    return np.fromiter(sums, np.uint64, len(starts))


def seal_of(manifest: bytes, sums: NDArray[np.uint64]) -> bytes:
    """What a complete file ends with; never `NO_SEAL`."""
    return hashlib.sha256(manifest + sums.tobytes()).digest()


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
