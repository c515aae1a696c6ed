"""State in messages of bounded size: which blocks of which tensors travel together.

A layer's state may be gigabytes. It is cut into blocks, along rows where they are small enough, and
blocks are put into **parcels** in the order of the tensors. Both ends do so from the shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Block", "Parcel", "parcels_of"]


class Block(NamedTuple):
    """A part of one tensor."""

    name: str
    kind: int
    """Which of the tensors of that name and shape: parameters or one of the moments."""
    where: tuple[slice, ...]
    """Index of the part; leading dims only."""
    num_elements: int


class Parcel(NamedTuple):
    """What one message carries: the elements of its blocks, one after the other."""

    blocks: tuple[Block, ...]

    @property
    def num_elements(self) -> int:
        """Of all blocks."""
        return sum(block.num_elements for block in self.blocks)


def parcels_of(
    shapes: Iterable[tuple[str, tuple[int, ...]]], num_kinds: int, max_elements: int
) -> Iterator[Parcel]:
    """All of the named tensors, `num_kinds` of each, none of them empty."""
    blocks: list[Block] = []
    room = max_elements
    for block in _blocks(shapes, num_kinds, max_elements):
        if block.num_elements > room:
            yield Parcel(tuple(blocks))
            blocks, room = [], max_elements
        blocks.append(block)
        room -= block.num_elements
    if blocks:
        yield Parcel(tuple(blocks))


def _blocks(
    shapes: Iterable[tuple[str, tuple[int, ...]]], num_kinds: int, max_elements: int
) -> Iterator[Block]:
    for name, shape in shapes:
        for kind in range(num_kinds):
            for where, size in _cuts(shape, max_elements):
                yield Block(name, kind, where, size)


def _cuts(shape: tuple[int, ...], max_elements: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Indices of parts of at most `max_elements`, in memory order, with their sizes."""
    size = math.prod(shape)
    if size <= max_elements:
        yield (), size
        return
    num_rows, *rest = shape
    row = size // num_rows
    if row > max_elements:
        for at in range(num_rows):
            for where, part in _cuts(tuple(rest), max_elements):
                yield (slice(at, at + 1), *where), part
        return
    step = max_elements // row
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        yield (slice(begin, end),), (end - begin) * row
