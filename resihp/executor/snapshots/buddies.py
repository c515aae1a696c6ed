"""Copies of snapshots on another node: each rank gives its own to a buddy there.

A snapshot that was sealed goes to the buddy as it lies in its file, and into a file of the same
name in the buddy's shared memory, its head last and only if the seal is that of the bytes. The
buddy says so. A rank brings its contribution to the next vote after that, so copies are never
older than the snapshots beside the ranks (`writer`); readers see no difference between them.

Where there is no snapshot to give, or the buddy cannot keep it, each says so and nobody waits:
there are no more copies of that rank in this generation, as if it had no buddy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from resihp.errors import CommError, GenerationClosed
from resihp.executor.device.interface import SNAPSHOT, Tag, Wire
from resihp.executor.snapshots.format import (
    HEAD_BYTES,
    NO_SEAL,
    Manifest,
    block_sums,
    encode_manifest,
    pack_head,
    places,
    seal_of,
)
from resihp.executor.snapshots.reader import sealed_in
from resihp.executor.snapshots.slots import Slots
from resihp.executor.snapshots.writer import Snapshots
from resihp.executor.stream import Event
from resihp.wire.messages import NoBuddyCopy

__all__ = ["Buddies", "buddy_of"]

PIECE_BYTES = 16 << 20
Shapes = Sequence[tuple[str, tuple[int, ...]]]


def buddy_of(rank: int, hosts: Mapping[int, str]) -> int | None:
    """The rank that keeps a copy for `rank`, on the next node; None where all share one.

    `hosts` says which node each rank of the plan is on, as its address.
    """
    nodes = sorted(set(hosts.values()))
    if len(nodes) < 2:
        return None
    mine = sorted(other for other in hosts if hosts[other] == hosts[rank])
    following = nodes[(nodes.index(hosts[rank]) + 1) % len(nodes)]
    there = sorted(other for other in hosts if hosts[other] == following)
    return there[mine.index(rank) % len(there)]


class _Begun(NamedTuple):
    """A snapshot that is being written, and what happens when its copy is sealed."""

    manifest: Manifest
    written: Event
    copied: Event


class Buddies:
    """One rank's copies in one generation: what it gives, and what it keeps for its wards."""

    def __init__(
        self,
        snapshots: Snapshots,
        wire: Callable[[], Wire],
        hosts: Mapping[int, str],
        shapes_of: Callable[[int], Shapes],
        tell: Callable[[NoBuddyCopy], None],
    ) -> None:
        """`shapes_of` a rank: the tensors of its snapshots; `tell` is called once, at most. On the
        event loop."""
        rank = snapshots.rank
        self._snapshots = snapshots
        self._wire = wire
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Begun] = asyncio.Queue()
        self._pending: set[Event] = set()
        self._is_over = False
        self._is_kept = True
        """No copy of ours was refused."""
        self._is_told = False
        """That there are no copies."""
        self.buddy = buddy_of(rank, hosts)
        self._wards = {
            ward: (shapes_of(ward), Slots(snapshots.folder, ward))
            for ward in sorted(hosts)
            if buddy_of(ward, hosts) == rank
        }
        self.near = {other for other in hosts if hosts[other] == hosts[rank]} | self._wards.keys()
        """Ranks whose snapshots belong into the memory of this node."""

    @property
    def peers(self) -> set[int]:
        """Ranks that this one sends to."""
        return self._wards.keys() | ({self.buddy} if self.buddy is not None else set())

    def begun(self, manifest: Manifest, written: Event) -> Event:
        """A snapshot is being written; what happens once its copy is sealed. From any thread."""
        copied = Event()
        self._pending.add(copied)
        if self._is_over:
            self._end(copied, GenerationClosed("the generation is over"))
        else:
            begun = _Begun(manifest, written, copied)
            self._loop.call_soon_threadsafe(self._queue.put_nowait, begun)
        return copied

    async def serve(self) -> None:
        """Exchange what is begun, until cancelled."""
        while True:
            manifest, written, copied = await self._queue.get()
            try:
                await self.exchange(manifest, written)
            except Exception as error:  # whoever waits for the copy raises it
                self._end(copied, error)
            else:
                self._end(copied, None)

    def stop(self) -> None:
        """The generation is over: nobody waits any longer."""
        self._is_over = True
        for copied in list(self._pending):
            self._end(copied, GenerationClosed("the generation is over"))

    def _end(self, copied: Event, error: BaseException | None) -> None:
        self._pending.discard(copied)
        if error is None:
            copied.set()
        else:
            copied.fail(error)

    async def exchange(self, manifest: Manifest, written: Event) -> None:
        """Give our snapshot, and keep those of our wards at the same version.

        CommError or PeerLost where a peer is gone. What cannot be copied is no error.
        """
        await asyncio.gather(
            self._give(manifest, written),
            *(self._keep(ward, manifest) for ward in self._wards),
        )

    async def _give(self, manifest: Manifest, written: Event) -> None:
        if self.buddy is None:
            return
        await written.wait_async()
        raw = written.wait()  # None where there was no memory for it
        comes = raw is not None and self._is_kept
        said = self._wire().send(self.buddy, _comes(manifest.version), _yes_or_no(comes))
        await said.wait_async()
        if raw is None:
            self._say_none(manifest, "there is no snapshot to copy")
        if not comes:
            return
        flat: Tensor = torch.frombuffer(raw, dtype=torch.uint8)
        whole = Event()
        whole.set(flat)
        sent = [
            self._wire().send(self.buddy, _tag(manifest.version, piece), whole, _cut(begin, end))
            for piece, (begin, end) in enumerate(_pieces(flat.numel()))
        ]
        for event in sent:
            await event.wait_async()
        answer = self._wire().receive(self.buddy, _done(manifest.version), 1)
        if not (await answer.wait_async())[0]:
            self._is_kept = False
            self._say_none(manifest, f"rank {self.buddy} cannot keep them")

    def _say_none(self, manifest: Manifest, why: str) -> None:
        if self._is_told or self.buddy is None:
            return
        self._is_told = True
        print(f"no copies of snapshots: {why}", flush=True)
        self._tell(NoBuddyCopy(generation=manifest.generation, buddy=self.buddy, why=why))

    async def _keep(self, ward: int, ours: Manifest) -> None:
        if not (await self._wire().receive(ward, _comes(ours.version), 1).wait_async())[0]:
            return
        shapes, slots = self._wards[ward]
        expected = Manifest(
            rank=ward,
            generation=ours.generation,
            version=ours.version,
            updates=ours.updates,
            tensors=tuple(shapes),
        )
        *_, size = places(expected, len(encode_manifest(expected)))
        arriving = [
            self._wire().receive(ward, _tag(ours.version, piece), end - begin)
            for piece, (begin, end) in enumerate(_pieces(size))
        ]
        parts = [await event.wait_async() for event in arriving]
        refusal = await asyncio.to_thread(_try_store, self._snapshots, slots, expected, size, parts)
        if refusal:
            print(f"no copies of the snapshots of rank {ward} here: {refusal}", flush=True)
        self._wire().send(ward, _done(ours.version), _yes_or_no(not refusal))


def _try_store(
    snapshots: Snapshots, slots: Slots, expected: Manifest, size: int, parts: Sequence[Any]
) -> str:
    """Keep a copy: '', or why it cannot be, and its memory is given back."""
    keep = _kept(snapshots, expected)
    try:
        _store(slots, expected, size, parts, keep)
    except (CommError, OSError) as error:
        slots.give_up(keep)
        return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return ""


def _kept(snapshots: Snapshots, expected: Manifest) -> tuple[int, int] | None:
    """Generation and version of the copy that stays while `expected` is written.

    The one before it of the same layout, else that of the layout which all would go on from.
    """
    found = [each.manifest for each in sealed_in(snapshots.folder, expected.rank)]
    base, newest = snapshots.base
    for generation, end in ((expected.generation, expected.version), (base, newest + 1)):
        usable = [m.version for m in found if m.generation == generation and m.version < end]
        if usable:
            return generation, max(usable)
    return None


def _store(
    slots: Slots,
    expected: Manifest,
    size: int,
    parts: Sequence[Any],
    keep: tuple[int, int] | None,
) -> None:
    """Write a copy, its head last; CommError where it is not what its owner sealed.

    OSError where there is no memory for it and the next one.
    """
    text = encode_manifest(expected)
    slots.reserve(expected, keep)
    raw = slots.fresh(size, keep)
    raw[:HEAD_BYTES] = pack_head(len(text), NO_SEAL)
    head = bytes(parts[0][:HEAD_BYTES])
    for (begin, end), part in zip(_pieces(size), parts, strict=True):
        skipped = HEAD_BYTES if begin == 0 else 0
        raw[begin + skipped : end] = part[skipped:]
    _, begin, _ = places(expected, len(text))
    sums = block_sums(np.frombuffer(raw, np.uint64, offset=begin))
    is_text = raw[HEAD_BYTES : HEAD_BYTES + len(text)] == text
    if not is_text or head != pack_head(len(text), seal_of(text, sums)):
        raise CommError(f"the snapshot of rank {expected.rank} came changed")
    raw[:HEAD_BYTES] = head


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))


def _cut(begin: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda flat: flat[begin:end]


def _tag(version: int, piece: int) -> Tag:
    return Tag(SNAPSHOT, version, 0, 0, piece, 0)


def _done(version: int) -> Tag:
    """One byte from the buddy: whether it has the copy."""
    return Tag(SNAPSHOT, version, 0, 0, 0, 1)


def _comes(version: int) -> Tag:
    """One byte to the buddy: whether there is anything to copy."""
    return Tag(SNAPSHOT, version, 0, 0, 0, 2)


def _yes_or_no(is_so: bool) -> Event:
    said = Event()
    said.set(torch.tensor([is_so], dtype=torch.uint8))
    return said
