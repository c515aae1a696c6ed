"""Versions in a checkpoint directory: which are complete, how one is completed, what is pruned.

A version is trusted from its marker down: marker, manifest, parts, chunks. Reading one checks all
of it but the chunks' bytes, which are hashed by whoever reads them (`check_data`, executors).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from resihp.checkpoint.disk import Disk, Folder, open_folder
from resihp.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_PART_BYTES,
    Chunk,
    Manifest,
    Marker,
    Part,
    PartFile,
    check_whole,
    chunk_bytes,
    data_name,
    decode,
    encode,
    part_name,
    sha256,
)
from resihp.errors import CheckpointRefused

__all__ = [
    "Listed",
    "Version",
    "check_data",
    "chunk_places",
    "complete",
    "discard",
    "list_versions",
    "newest_complete",
    "parse_name",
    "prune",
    "read_chunk",
    "read_manifest",
    "read_parts",
    "version_name",
]

_NAME = re.compile(r"step-(\d{8,13})-([0-9a-f]{8})-g(\d{1,9})")
_OURS = re.compile(rf"part-\d{{5}}\.(data|json)|{re.escape(MANIFEST)}|{COMPLETE}(\.new)?")
_NEW = f"{COMPLETE}.new"
MAX_MARKER_BYTES = 4096
BLOCK_BYTES = 8 << 20
"""Read at a time to be hashed."""


class Version(NamedTuple):
    """What the name of a version's directory says; a later one is greater."""

    step: int
    generation: int
    run: str
    """Digest of the run's name."""


class Listed(NamedTuple):
    """A version as found on disk."""

    name: str
    version: Version
    manifest: Manifest | None
    """None where it is not complete."""
    trouble: str
    """Why it was refused although it has a marker; '' where it has none or is complete."""


def version_name(step: int, run: str, generation: int) -> str:
    """A directory that no other save writes to: runs have names of their own."""
    return f"step-{step:08}-{hashlib.sha256(run.encode()).hexdigest()[:8]}-g{generation}"


def parse_name(name: str) -> Version | None:
    """None where it is no version's."""
    found = _NAME.fullmatch(name)
    return Version(int(found[1]), int(found[3]), found[2]) if found else None


# --- reading


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a version's directory. CheckpointRefused where it is not complete."""
    if not folder.has(COMPLETE):
        raise CheckpointRefused(f"{folder.path} is not complete: its marker is missing")
    where = str(folder.path / COMPLETE)
    marker = decode(folder.read_small(COMPLETE, MAX_MARKER_BYTES), Marker, where)
    raw = folder.read_small(MANIFEST, MAX_MANIFEST_BYTES)
    where = str(folder.path / MANIFEST)
    if len(raw) != marker.manifest_bytes or sha256(raw) != marker.manifest_sha256:
        raise CheckpointRefused(f"{where}: its hash is not that of the marker")
    manifest = decode(raw, Manifest, where)
    named = parse_name(folder.path.name)
    if named is None or named.step != manifest.step:
        raise CheckpointRefused(f"{where}: step {manifest.step} in a directory of another name")
    if len({part.rank for part in manifest.parts}) != len(manifest.parts):
        raise CheckpointRefused(f"{where}: two parts of one rank")
    return manifest


def read_parts(folder: Folder, manifest: Manifest) -> dict[int, Part]:
    """All parts by rank. CheckpointRefused where one is not as the manifest says, or not whole."""
    parts = {file.rank: _read_part(folder, file) for file in manifest.parts}
    try:
        check_whole(parts.values(), manifest.step)
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{folder.path}: {error}") from error
    return parts


def _read_part(folder: Folder, file: PartFile) -> Part:
    where = str(folder.path / part_name(file.rank))
    raw = folder.read_small(part_name(file.rank), MAX_PART_BYTES)
    if len(raw) != file.part_bytes or sha256(raw) != file.part_sha256:
        raise CheckpointRefused(f"{where}: its hash is not that of the manifest")
    part = decode(raw, Part, where)
    try:
        num_bytes = part.num_bytes
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{where}: {error}") from error
    with folder.reading(data_name(file.rank)) as data:
        size = os.fstat(data).st_size
    if not size == file.data_bytes == num_bytes:
        raise CheckpointRefused(
            f"{folder.path / data_name(file.rank)}: {size} bytes, not {num_bytes}"
        )
    return part


def chunk_places(part: Part) -> Iterator[tuple[Chunk, int, int]]:
    """Each chunk with its place in the data file and its size, in bytes."""
    at = 0
    for chunk in part.chunks:
        size = chunk_bytes(part, chunk)
        yield chunk, at, size
        at += size


def read_chunk(file: int, chunk: Chunk, at: int, into: memoryview, where: str) -> None:
    """Fill `into` from an open data file; CheckpointRefused where the hash is another one."""
    view = into.cast("B")
    done = 0
    while done < len(view):
        num = os.preadv(file, [view[done : done + BLOCK_BYTES]], at + done)
        if num == 0:
            break
        done += num
    if done < len(view) or sha256(view) != chunk.sha256:
        raise _damaged(where, chunk)


def check_data(folder: Folder, rank: int, part: Part) -> None:
    """Hash every chunk of a part; CheckpointRefused names the first that is damaged."""
    where = str(folder.path / data_name(rank))
    with folder.reading(data_name(rank)) as file:
        for chunk, at, size in chunk_places(part):
            digest = hashlib.sha256()
            while size:
                block = os.pread(file, min(size, BLOCK_BYTES), at)
                if not block:
                    break
                digest.update(block)
                at, size = at + len(block), size - len(block)
            if size or digest.hexdigest() != chunk.sha256:
                raise _damaged(where, chunk)


def _damaged(where: str, chunk: Chunk) -> CheckpointRefused:
    return CheckpointRefused(
        f"{where}: {chunk.tensor} at {list(chunk.offsets)}: its hash is not that of the part"
    )


def list_versions(directory: Path) -> list[Listed]:
    """All versions, newest first; none where there is no such directory."""
    try:
        with open_folder(directory) as folder:
            named = [(name, parse_name(name)) for name in folder.names()]
            found = [_listed(folder, name, version) for name, version in named if version]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda each: (each.version, each.name), reverse=True)


def _listed(folder: Folder, name: str, version: Version) -> Listed:
    try:
        with folder.inside(name) as inner:
            if not inner.has(COMPLETE):
                return Listed(name, version, None, "")
            manifest = read_manifest(inner)
            read_parts(inner, manifest)
            return Listed(name, version, manifest, "")
    except CheckpointRefused as error:
        return Listed(name, version, None, str(error))
    except OSError as error:  # a link or a file in its place, or it was pruned just now
        return Listed(name, version, None, f"{folder.path / name}: {error.strerror}")


def newest_complete(directory: Path) -> tuple[Listed | None, list[str]]:
    """The newest complete version, and why newer ones are not it."""
    troubles: list[str] = []
    for each in list_versions(directory):
        if each.manifest is not None:
            return each, troubles
        if each.trouble:
            troubles.append(each.trouble)
    return None, troubles


# --- writing


def complete(directory: Path, name: str, manifest: Manifest, disk: Disk | None = None) -> None:
    """Check the parts of a version and mark it complete, on disk before this returns.

    Nothing is done where it is complete; what somebody left who died on the way is written anew.
    CheckpointRefused where the parts are not one whole state, OSError where the disk is at fault;
    then it has no marker.
    """
    with open_folder(directory, disk) as parent, parent.inside(name) as folder:
        if folder.has(COMPLETE):
            read_manifest(folder)
            return
        read_parts(folder, manifest)
        for stale in (MANIFEST, _NEW):
            if folder.has(stale):
                folder.unlink(stale)
        raw = encode(manifest)
        folder.write_new(MANIFEST, [raw])
        marker = Marker(manifest_bytes=len(raw), manifest_sha256=sha256(raw))
        folder.write_new(_NEW, [encode(marker)])
        folder.sync()
        folder.rename(_NEW, COMPLETE)
        folder.sync()


def prune(
    directory: Path,
    keep: int,
    spared: Collection[str] = (),
    *,
    newest: str = "",
    disk: Disk | None = None,
) -> Iterator[str]:
    """Remove complete versions but the newest `keep`, and torn ones that are older than one.

    Where `newest` is named, it is the newest one: complete ones that come after it belong to what
    the job went back from, stay, and are none of the `keep`. The same holds for those in `spared`:
    somebody found their bytes damaged, or reads them now. What is listed as refused stays too:
    somebody may want to look at it.
    Yields each name before that version goes. OSError where the disk is at fault; at every moment
    each version is complete or has no marker.
    """
    assert keep >= 1
    listed = list_versions(directory)
    begin = next((at for at, each in enumerate(listed) if each.name == newest), 0)
    found = [each for each in listed[begin:] if not each.trouble and each.name not in spared]
    whole = [each for each in found if each.manifest is not None]
    if not whole:
        return
    stay = {newest, *(each.name for each in whole[:keep])}
    for each in found:
        is_old = each.manifest is not None or each.version.step <= whole[0].version.step
        if each.name not in stay and is_old:
            yield each.name
            discard(directory, each.name, disk)


def discard(directory: Path, name: str, disk: Disk | None = None) -> None:
    """Remove a version, its marker first. What we did not write stays, and its directory with it.

    OSError where the disk is at fault; nothing happens where there is no such version.
    """
    assert parse_name(name) is not None
    with open_folder(directory, disk) as parent:
        if not parent.has(name):
            return
        with parent.inside(name) as folder:
            names = folder.names()
            if COMPLETE in names:
                folder.unlink(COMPLETE)
                folder.sync()
            others = [other for other in names if other != COMPLETE]
            for other in others:
                if _OURS.fullmatch(other):
                    folder.unlink(other)
            is_empty = all(_OURS.fullmatch(other) for other in others)
        if is_empty:
            parent.rmdir(name)
            parent.sync()
