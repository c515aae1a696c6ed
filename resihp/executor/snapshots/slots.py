"""The two slots of one rank: where its snapshots are written, in pieces and sealed last."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resihp.executor.snapshots.format import (
    BLOCK_WORDS,
    FP32_BYTES,
    HEAD_BYTES,
    NO_SEAL,
    NUM_SLOTS,
    WORD_BYTES,
    Manifest,
    Place,
    encode_manifest,
    pack_head,
    places,
    seal_of,
)
from resihp.executor.snapshots.reader import sealed_in, slot_path

__all__ = ["Kinds", "Slots"]

Kinds = Sequence[Mapping[str, Tensor]]
"""Parameters and both moments, by name."""
PIECE = BLOCK_WORDS * WORD_BYTES // FP32_BYTES
"""Elements that are copied at a time."""


class _Slot(NamedTuple):
    """A file of ours, mapped."""

    raw: mmap.mmap
    size: int


class Slots:
    """Writes the snapshots of `rank`, one after the other, into `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._slots: list[_Slot | None] = [None] * NUM_SLOTS

    def reserve(self, manifest: Manifest, keep: tuple[int, int] | None) -> None:
        """Take the memory for such snapshots in the slots that may be written.

        `keep` as in `write`. OSError where there is not enough: then nothing is sealed there.
        """
        *_, size = places(manifest, len(encode_manifest(manifest)))
        for slot in self._free(keep):
            self._mapped(slot, size)

    def fresh(self, size: int, keep: tuple[int, int] | None) -> mmap.mmap:
        """The memory of a slot that is not `keep`, without a seal, to write `size` bytes into."""
        (slot, *_) = self._free(keep)
        raw = self._mapped(slot, size).raw
        raw[HEAD_BYTES - len(NO_SEAL) : HEAD_BYTES] = NO_SEAL
        return raw

    def write(self, manifest: Manifest, kinds: Kinds, keep: tuple[int, int] | None) -> mmap.mmap:
        """Copy and seal; the file's bytes.

        The slot with the sealed generation and version `keep` stays as it is.

        `kinds` hold the tensors of the manifest and do not change meanwhile. OSError where there
        is not enough memory.
        """
        text = encode_manifest(manifest)
        found, begin, size = places(manifest, len(text))
        (slot, *_) = self._free(keep)
        raw = self._mapped(slot, size).raw
        raw[:HEAD_BYTES] = pack_head(len(text), NO_SEAL)  # before a byte of it changes
        raw[HEAD_BYTES : HEAD_BYTES + len(text)] = text
        words = np.frombuffer(raw, np.uint64, offset=begin)
        sums = np.fromiter(_copied(found, kinds, raw, words, begin), np.uint64)
        raw[:HEAD_BYTES] = pack_head(len(text), seal_of(text, sums))
        return raw

    def give_up(self, keep: tuple[int, int] | None) -> None:
        """Give the memory back, but for the slot with the sealed `keep`."""
        self.forget()
        for slot in self._free(keep):
            self._path(slot).unlink(missing_ok=True)

    def forget(self) -> None:
        """Let the mappings go; the files stay."""
        self._slots = [None] * NUM_SLOTS

    def _free(self, keep: tuple[int, int] | None) -> list[int]:
        """Slots that may be written, the one with the oldest snapshot first."""
        age: dict[int, tuple[int, int]] = dict.fromkeys(range(NUM_SLOTS), (-1, -1))
        for path, found in sealed_in(self._folder, self._rank):
            age[int(path.suffix[1:])] = found.generation, found.version
        free = [slot for slot in age if age[slot] != keep or keep is None]
        return sorted(free, key=age.__getitem__)

    def _mapped(self, slot: int, size: int) -> _Slot:
        """The file of a slot with memory of its own for `size` bytes; what it held may be gone."""
        mapped = self._slots[slot]
        if mapped is None or mapped.size != size:
            # A new file, not a cut one: whoever still reads the old one keeps its bytes.
            self._slots[slot] = None
            mapped = self._slots[slot] = _Slot(_reserved(self._path(slot), size), size)
        return mapped

    def _path(self, slot: int) -> Path:
        return slot_path(self._folder, self._rank, slot)


def _reserved(path: Path, size: int) -> mmap.mmap:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _copied(
    found: Sequence[Place],
    kinds: Kinds,
    raw: mmap.mmap,
    words: NDArray[np.uint64],
    begin: int,
) -> Iterator[int]:
    """Copy all tensors to their places; the sum of each block once it is there."""
    summed = 0
    for place in found:
        source = kinds[place.kind][place.name].detach().reshape(-1)
        assert source.numel() == place.num_elements, f"{place.name}: not of its shape"
        for start in range(0, place.num_elements, PIECE):
            count = min(PIECE, place.num_elements - start)
            offset = place.offset + start * FP32_BYTES
            target = torch.frombuffer(raw, dtype=torch.float32, count=count, offset=offset)
            target.copy_(source[start : start + count])
            complete = (offset + count * FP32_BYTES - begin) // (BLOCK_WORDS * WORD_BYTES)
            yield from _sums(words, summed, complete)
            summed = complete
    yield from _sums(words, summed, -(-len(words) // BLOCK_WORDS))


def _sums(words: NDArray[np.uint64], first: int, end: int) -> Iterator[int]:
    for block in range(first, end):
        yield np.add.reduce(words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS])
