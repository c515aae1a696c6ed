"""What outlives the processes of the simulated cluster: memory of a node, disks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from resihp.checkpoint.manifest import Manifest
from resihp.checkpoint.versions import Version, parse_name
from resihp.monitor.actions import Log
from resihp.monitor.checkpoints import SavedVersion, saved_version
from resihp.monitor.memory import Memory as CoordinatorMemory
from resihp.monitor.memory import memory_of
from resihp.wire.messages import Sealed, StepRecord
from resihp.wire.quorum import Entry

History = tuple[tuple[int, int], ...]
Key = tuple[int, int]
"""Generation whose layout a snapshot has, and its version."""
NUM_SLOTS = 2


class Snapshot(NamedTuple):
    history: History
    updates: int


class Memory:
    """The snapshots of one node, in two slots of each rank."""

    def __init__(self) -> None:
        self._sealed: dict[int, dict[Key, Snapshot]] = {}

    def of(self, rank: int) -> dict[Key, Snapshot]:
        return self._sealed.get(rank, {})

    def begin(self, rank: int, keep: Key | None) -> None:
        """A slot that does not hold `keep` is written, the oldest: what it held is gone."""
        slots = self._sealed.setdefault(rank, {})
        if len(slots) == NUM_SLOTS:
            del slots[min(key for key in slots if key != keep)]

    def reserve(self, rank: int, keep: Key | None) -> None:
        """Both slots get another size, but for the one that holds `keep`."""
        slots = self._sealed.setdefault(rank, {})
        for key in [key for key in slots if key != keep]:
            del slots[key]

    def seal(self, rank: int, key: Key, snapshot: Snapshot) -> None:
        self._sealed[rank][key] = snapshot

    def sealed(self) -> tuple[Sealed, ...]:
        return tuple(
            Sealed(rank=rank, generation=key[0], version=key[1], updates=found.updates)
            for rank, slots in sorted(self._sealed.items())
            for key, found in slots.items()
        )

    def remove_all_but(self, ranks: Collection[int]) -> None:
        self._sealed = {rank: slots for rank, slots in self._sealed.items() if rank in ranks}


class RunDir:
    """What coordinators leave for the next one."""

    def __init__(self) -> None:
        self.records: dict[int, StepRecord] = {}
        self._rows: list[bytes] = []

    def event(self, log: Log, at_s: float) -> None:
        if log.kind != "decision":  # which nobody reads again
            row = {"event": log.kind, "at_s": at_s, **log.fields}
            self._rows.append(msgspec.json.encode(row))

    def memory(self) -> CoordinatorMemory:
        return memory_of(self._rows, len(self.records))

    def before(self, entry: Entry) -> list[StepRecord]:
        """As `Past.before`; `num_tokens` of a record is its generation."""
        return [
            self.records[step]
            for step in sorted(self.records)
            if step < entry.commit.version or self.records[step].num_tokens >= entry.generation
        ]

    def take_back(self, version: int) -> None:
        for step in [step for step in self.records if step >= version]:
            del self.records[step]


class Part(NamedTuple):
    """What one rank wrote."""

    step: int
    updates: int
    history: History

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class _Folder:
    """Of one version; the manifest is its marker."""

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.manifest: Manifest | None = None
        self.is_damaged = False


class Disk:
    """The directory of versions, which all nodes see; what `checkpoint.versions` does on files."""

    def __init__(self) -> None:
        self._folders: dict[str, _Folder] = {}

    def write(self, name: str, rank: int, part: Part) -> str:
        """'' or why it cannot be: nothing is written over."""
        parts = self._folders.setdefault(name, _Folder()).parts
        if rank in parts:
            return f"part {rank}: File exists"
        parts[rank] = part
        return ""

    def complete(self, name: str, manifest: Manifest) -> str:
        """Mark a version complete; '' or why it cannot be."""
        folder = self._folders.get(name)
        if folder is None:
            return f"{name}: no such directory"
        if folder.manifest is not None:
            return ""
        parts = [folder.parts.get(file.rank) for file in manifest.parts]
        for part, file in zip(parts, manifest.parts, strict=True):
            if part is None or part.digest != file.part_sha256:
                return f"part of rank {file.rank}: its hash is not that of the manifest"
        assert len(set(parts)) == 1, f"{name} is complete, and mixed"
        (part, *_) = parts
        assert part is not None
        whole = (len(part.history), part.step, part.updates)
        assert whole == (manifest.step, manifest.step, manifest.updates), f"{name} is not whole"
        folder.manifest = manifest
        return ""

    def prune(self, keep: int, spared: Collection[str], newest: str) -> list[str]:
        """What goes; see `checkpoint.versions.prune`."""
        names = sorted(self._folders, key=_version, reverse=True)
        found = [name for name in names[names.index(newest) :] if name not in spared]
        whole = [name for name in found if self._folders[name].manifest is not None]
        stay = {newest, *whole[:keep]}
        gone: list[str] = []
        for name in found:
            is_old = self._folders[name].manifest is not None or _version(name) <= _version(newest)
            if name not in stay and is_old:
                gone.append(name)
                del self._folders[name]
        return gone

    def drop(self, name: str) -> None:
        """A version that will not be complete."""
        folder = self._folders.pop(name, None)
        assert folder is None or folder.manifest is None, "a complete version was dropped"

    def listed(self) -> list[SavedVersion]:
        """The complete ones, newest first."""
        names = sorted(self._folders, key=_version, reverse=True)
        return [
            saved_version(name, manifest)
            for name in names
            if (manifest := self._folders[name].manifest) is not None
        ]

    def intact(self) -> dict[str, int]:
        """Step of each version that can be loaded."""
        return {each.name: each.step for each in self.listed() if self.load(each.name) is not None}

    def damage(self, name: str) -> None:
        """Bytes of it change; its marker and manifest do not."""
        self._folders[name].is_damaged = True

    def load(self, name: str) -> History | None:
        """None where it is damaged, or not there."""
        folder = self._folders.get(name)
        if folder is None or folder.manifest is None or folder.is_damaged:
            return None
        return next(iter(folder.parts.values())).history


def _version(name: str) -> Version:
    version = parse_name(name)
    assert version is not None
    return version
