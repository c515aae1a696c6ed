"""When snapshots are written: begun after an update, sealed before the next vote.

Parameters and moments are only read between two updates, so a thread copies them while the next
iteration computes. A rank brings its contribution to the vote of an iteration only once the
snapshot before it is sealed; so whoever completed step v proves that everybody has sealed
version v, and the versions in shared memory never lie further apart than the slots hold.
"""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from resihp.config.schema import Auto
from resihp.executor.snapshots.cadence import Cadence, Cost
from resihp.executor.snapshots.format import Manifest
from resihp.executor.snapshots.reader import (
    Snapshot,
    files_in,
    open_snapshot,
    sealed_in,
    unseal,
)
from resihp.executor.snapshots.slots import Kinds, Slots
from resihp.executor.stream import Event, ThreadStream
from resihp.wire.messages import Sealed

__all__ = ["Snapshots", "manifest_of"]


def manifest_of(
    rank: int, generation: int, version: int, updates: int, parameters: Mapping[str, Tensor]
) -> Manifest:
    """Of a rank that holds `parameters` in the layout of `generation`."""
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in parameters.items())
    return Manifest(
        rank=rank, generation=generation, version=version, updates=updates, tensors=tensors
    )


class Snapshots:
    """The snapshots of one rank, and its view of those of its node. Not for use by many threads.

    `every`: steps between two, or `auto` (see `cadence`).
    """

    def __init__(self, folder: Path, rank: int, every: int | Auto) -> None:
        self.folder = folder
        self.rank = rank
        self._every = every
        self._slots = Slots(folder, rank)
        self._cadence = Cadence()
        self._busy_s: float | None = None
        """Processor time of the newest one, until it was weighed."""
        self._waited_s = 0.0
        """How long votes waited for it."""
        self._begun = 0
        """Version of the newest one that was begun."""
        self._stream = ThreadStream("snapshots")
        self._writing: Event | None = None
        self._newest: tuple[int, int] | None = None
        """Generation and version to go back to: the slot that stays while the other is written."""
        self.base = (0, 0)
        """Generation whose layout all went on from, and the version."""
        self.on_begin: Callable[[Manifest, Event], Event] | None = None
        """Makes a copy elsewhere of what is being written, and says what happens once it is."""
        self._copied: Event | None = None
        self.refusal = ""
        """Why nothing is written any more, in words; '' while all is well."""

    def is_due(self, version: int, gap: int) -> bool:
        """Whether the state at `version` is to be kept; `gap` is what all members agreed on."""
        if isinstance(self._every, str):
            return version - self._begun >= gap
        return version % self._every == 0

    def gap(self, step: Cost) -> int:
        """How many steps are to lie between two, as this rank sees it after a step of that cost."""
        busy_s, self._busy_s = self._busy_s, None
        if busy_s is not None:
            self._cadence.add(Cost(busy_s, self._waited_s), step)
            self._waited_s = 0.0
        return self._cadence.gap

    def reserve(self, manifest: Manifest) -> None:
        """Take memory for snapshots of this layout; OSError where there is not enough."""
        self.finish()
        self._cadence.begin()
        self._slots.reserve(manifest, self._newest)

    def begin(self, manifest: Manifest, kinds: Kinds) -> None:
        """Copy `kinds`, which stay as they are until `finish`, on a thread.

        On CUDA what the current stream was given so far is done before they are read.
        """
        self.finish()
        self._begun = manifest.version
        if self.refusal:
            writing = Event()
            writing.set(None)  # whoever would copy it is told that there is nothing
        else:
            ready = _mark(kinds)
            writing = self._stream.submit(partial(self._write, manifest, kinds, ready))
        self._writing = writing
        if self.on_begin is not None:
            self._copied = self.on_begin(manifest, writing)

    def _write(
        self, manifest: Manifest, kinds: Kinds, ready: torch.Event | None
    ) -> mmap.mmap | None:
        began_s = time.thread_time()
        try:
            if ready is not None:
                ready.synchronize()
            raw = self._slots.write(manifest, kinds, self._newest)
        except OSError as error:
            # No room: the state is as safe as without snapshots, and training goes on.
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.refuse(error)
            return None
        self._newest = manifest.generation, manifest.version
        # A GPU's copy engine works beside its compute: there only waiting for it costs.
        self._busy_s = time.thread_time() - began_s if ready is None else 0.0
        return raw

    def refuse(self, error: OSError) -> None:
        """No more snapshots until `allow`."""
        self.refusal = f"no snapshots: {error.strerror} in {self.folder}"
        print(self.refusal, flush=True)

    def why_not(self, error: OSError) -> str:
        """What the user is told where there is no memory for snapshots."""
        return (
            f"{self.folder}: {error.strerror}: the two snapshots of rank {self.rank} do not fit "
            "into this node's shared memory; make it larger, or set `snapshot_every = 0` in [state]"
        )

    def allow(self) -> None:
        """Try again, as at the beginning of a generation."""
        self.refusal = ""

    def finish(self) -> None:
        """Wait until what was begun is sealed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def written(self) -> Event:
        """What was begun, sealed; its result is the file's bytes, or None without memory."""
        writing = self._writing
        if writing is None:
            writing = Event()
            writing.set(None)
        self.finish()
        return writing

    def finish_copy(self) -> None:
        """Wait until it is sealed elsewhere too, where it is copied; raises what broke that."""
        began_s = time.monotonic()
        self.finish()
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.wait()
        self._waited_s += time.monotonic() - began_s

    def sealed(self) -> tuple[Sealed, ...]:
        """Everything that is sealed on this node, by its heads."""
        self.finish()
        return tuple(
            Sealed(
                rank=manifest.rank,
                generation=manifest.generation,
                version=manifest.version,
                updates=manifest.updates,
            )
            for _, manifest in sealed_in(self.folder)
        )

    def open(self, rank: int, *, generation: int, version: int) -> Snapshot | None:
        """A snapshot of any rank of this node; None where it is not there or not whole.

        One that is not whole is never offered again.
        """
        self.finish()
        found = open_snapshot(self.folder, rank, generation=generation, version=version)
        if found is None:
            return None
        path, snapshot = found
        if snapshot is None:
            unseal(path)
        return snapshot

    def settle(self, generation: int, version: int) -> None:
        """The job goes on from `version` in the layout of `generation`.

        The newest snapshot that is not after it stays until another one is sealed; what this
        rank did beyond is no history any more.
        """
        self.finish()
        self._copied = None  # of a generation that is over
        self.base = generation, version
        mine = (found.manifest for found in sealed_in(self.folder, self.rank))
        usable = [m.version for m in mine if m.generation == generation and m.version <= version]
        self._newest = (generation, max(usable)) if usable else None

    def forget(self) -> None:
        """This rank holds nothing any more; its files are for others to remove."""
        self.finish()
        self._slots.forget()

    def remove_all_but(self, ranks: Collection[int]) -> None:
        """Remove what is left of other ranks: all others run a newer layout, so nobody needs it."""
        for rank, path in files_in(self.folder):
            if rank not in ranks:
                path.unlink(missing_ok=True)


def _mark(kinds: Kinds) -> torch.Event | None:
    first = next(iter(kinds[0].values()), None)
    if first is None or not first.is_cuda:
        return None
    return torch.cuda.current_stream(first.device).record_event()
