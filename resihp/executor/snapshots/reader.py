"""Reading snapshots of any rank: what a directory holds, and one of them checked and mapped.

Nothing in the directory is trusted: a file counts only if it is a regular file of ours, its head
and manifest are of the format, its size is what the manifest says, and, before its tensors are
used, its seal is that of its bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from resihp.executor.snapshots.format import (
    HEAD_BYTES,
    NO_SEAL,
    NUM_KINDS,
    Head,
    Manifest,
    block_sums,
    decode_manifest,
    places,
    seal_of,
    unpack_head,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Found", "Snapshot", "files_in", "open_snapshot", "sealed_in", "slot_path", "unseal"]

_NAME = re.compile(r"rank(\d{1,6})\.[01]")


class Found(NamedTuple):
    """A file that was sealed; its bytes were not looked at."""

    path: Path
    manifest: Manifest


class Snapshot(NamedTuple):
    """The state in a file, checked. Its tensors are views that nobody else sees changed."""

    manifest: Manifest
    kinds: tuple[dict[str, Tensor], ...]
    """Parameters and both moments, by name."""


def slot_path(folder: Path, rank: int, slot: int) -> Path:
    """The file of slot 0 or 1 of `rank`."""
    return folder / f"rank{rank}.{slot}"


def sealed_in(folder: Path, rank: int | None = None) -> list[Found]:
    """All that is sealed (of `rank`), in order of rank and slot."""
    found: list[Found] = []
    for owner, path in files_in(folder):
        if rank in (None, owner):
            read = _manifest_of(path)
            if read is not None and read.rank == owner:
                found.append(Found(path, read))
    return found


def files_in(folder: Path) -> list[tuple[int, Path]]:
    """The slots that are there, sealed or not, each with the rank that it is of; in order."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    return sorted((int(match[1]), folder / match[0]) for match in matches)


def _manifest_of(path: Path) -> Manifest | None:
    with _opened(path, os.O_RDONLY) as fd:
        read = None if fd is None else _head_of(fd)
        return None if read is None or read[0].seal == NO_SEAL else read[1]


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Generator[int | None]:
    """The file, None where it is not a regular one of ours."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # gone, a link, or not ours
        yield None
        return
    try:
        kind = os.fstat(fd)
        is_ours = stat.S_ISREG(kind.st_mode) and kind.st_uid == os.getuid()
        yield fd if is_ours else None
    finally:
        os.close(fd)


def _head_of(fd: int) -> tuple[Head, Manifest, bytes] | None:
    """Head and manifest of a file whose size is the one that they say."""
    head = unpack_head(os.pread(fd, HEAD_BYTES, 0))
    if head is None:
        return None
    raw = os.pread(fd, head.manifest_bytes, HEAD_BYTES)
    manifest = decode_manifest(raw)
    if len(raw) != head.manifest_bytes or manifest is None:
        return None
    names = {name for name, _ in manifest.tensors}
    if len(names) != len(manifest.tensors):
        return None
    *_, size = places(manifest, head.manifest_bytes)
    return (head, manifest, raw) if os.fstat(fd).st_size == size else None


def open_snapshot(
    folder: Path, rank: int, *, generation: int, version: int
) -> tuple[Path, Snapshot | None] | None:
    """The one of `rank` with that layout and version, and its file; None where there is none.

    The snapshot is None where the bytes are not those that were sealed: whoever finds that
    unseals the file, so that nobody counts on it.
    """
    for found in sealed_in(folder, rank):
        if (found.manifest.generation, found.manifest.version) == (generation, version):
            return found.path, _mapped(found)
    return None


def _mapped(found: Found) -> Snapshot | None:
    with _opened(found.path, os.O_RDONLY) as fd:
        read = None if fd is None else _head_of(fd)
        if fd is None or read is None or read[1] != found.manifest:
            return None
        # A private mapping: tensors of it can be written to, and nobody else sees it.
        raw = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    (head, manifest, text) = read
    _, begin, _ = places(manifest, head.manifest_bytes)
    words = np.frombuffer(raw, np.uint64, offset=begin)
    if seal_of(text, block_sums(words)) != head.seal:
        return None
    return Snapshot(manifest, _tensors(raw, manifest, head.manifest_bytes))


def _tensors(
    raw: mmap.mmap, manifest: Manifest, manifest_bytes: int
) -> tuple[dict[str, Tensor], ...]:
    import torch

    kinds: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(NUM_KINDS))
    for place in places(manifest, manifest_bytes)[0]:
        size = place.num_elements
        flat = (
            torch.frombuffer(raw, dtype=torch.float32, count=size, offset=place.offset)
            if size
            else torch.empty(0)
        )
        kinds[place.kind][place.name] = flat.view(place.shape)
    return kinds


def unseal(path: Path) -> None:
    """Nobody is to use this file any more."""
    with _opened(path, os.O_RDWR) as fd:
        if fd is not None:
            os.pwrite(fd, NO_SEAL, HEAD_BYTES - len(NO_SEAL))
