"""Snapshots in shared memory: whole or not there at all."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from snapshot_writer import SHAPES
from torch import Tensor

from resihp.executor.snapshots import slots as slots_module
from resihp.executor.snapshots.format import MAX_MANIFEST_BYTES, Manifest
from resihp.executor.snapshots.reader import Snapshot, open_snapshot, sealed_in, slot_path, unseal
from resihp.executor.snapshots.slots import Slots
from resihp.executor.snapshots.writer import Snapshots, manifest_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir(mode=0o700)
    return path


def kinds_of(seed: int) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
        for _ in range(3)
    ]


def written(folder: Path, version: int, *, rank: int = 3, keep: tuple[int, int] | None = None):
    kinds = kinds_of(version)
    manifest = manifest_of(rank, 7, version, version, kinds[0])
    Slots(folder, rank).write(manifest, kinds, keep)
    return kinds


def read(folder: Path, version: int, rank: int = 3) -> Snapshot | None:
    found = open_snapshot(folder, rank, generation=7, version=version)
    return None if found is None else found[1]


def versions(folder: Path) -> list[int]:
    return sorted(found.manifest.version for found in sealed_in(folder))


def test_a_snapshot_is_read_as_it_was_written(folder: Path):
    """Every bit of parameters and both moments, empty tensors too."""
    kinds = written(folder, 4)
    snapshot = read(folder, 4)
    assert snapshot is not None
    for there, here in zip(snapshot.kinds, kinds, strict=True):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)


def test_two_slots_hold_the_last_two(folder: Path):
    """The one that is kept is never written to, the other one is used again."""
    slots, keep = Slots(folder, 3), None
    for version in range(1, 6):
        kinds = kinds_of(version)
        slots.write(manifest_of(3, 7, version, version, kinds[0]), kinds, keep)
        keep = 7, version
        assert versions(folder) == [max(1, version - 1), version][-min(version, 2) :]
    assert len(list(folder.iterdir())) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_a_reader_keeps_what_it_mapped_when_the_slot_gets_another_size(folder: Path):
    """A new file takes the place of the old one, whose bytes stay with whoever has them."""
    kinds = written(folder, 1)
    snapshot = read(folder, 1)
    assert snapshot is not None
    small = [{"a": torch.zeros(3)} for _ in range(3)]
    for version in (2, 3):
        Slots(folder, 3).write(manifest_of(3, 7, version, 1, small[0]), small, (7, version - 1))
    assert versions(folder) == [2, 3]
    assert torch.equal(snapshot.kinds[1]["a"], kinds[1]["a"])


@pytest.fixture
def nursery(folder: Path) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).parent / "snapshot_writer.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield process
    process.kill()
    process.communicate()


def test_a_writer_that_is_killed_leaves_whole_snapshots_only(
    folder: Path, nursery: subprocess.Popen[str]
):
    """[T14] SIGKILL at any moment of a copy: what counts as sealed is one version throughout,
    and once there was one there always is one."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    chance = random.Random(0)
    torn = 0
    for _ in range(40):
        nursery.stdin.write("\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        while not sealed_in(folder):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        found = sealed_in(folder)
        torn += len(found) == 1
        assert found
        for each in found:
            version = each.manifest.version
            snapshot = read(folder, version)
            assert snapshot is not None, "sealed, and not whole"
            for kind in snapshot.kinds:
                assert all(bool((tensor == version).all()) for tensor in kind.values())
        for path in folder.iterdir():
            path.unlink()
    assert torn, "no kill hit a copy: the test says nothing"


@pytest.mark.parametrize("place", [0, 9, 20, 60, 5000, -1])
def test_a_changed_byte_is_found(folder: Path, place: int):
    """Wherever it is: in the head, the manifest or a tensor."""
    written(folder, 1)
    path = slot_path(folder, 3, 0)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0x10
    path.write_bytes(raw)
    assert read(folder, 1) is None


@pytest.mark.parametrize("size", [0, 10, 48, 4096, 500_000])
def test_a_cut_file_is_none(folder: Path, size: int):
    """It is not even listed."""
    written(folder, 1)
    os.truncate(slot_path(folder, 3, 0), size)
    assert sealed_in(folder) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"RESIHPS1" + (1 << 40).to_bytes(8, "little") + b"x" * 32,
        b"RESIHPS1" + (MAX_MANIFEST_BYTES).to_bytes(8, "little") + b"x" * 32 + b"\x81" * 5000,
        b"RESIHPS1" + (1000).to_bytes(8, "little") + b"x" * 32 + b"\x91" * 1000,
    ],
    ids=["empty", "absurd length", "no manifest", "endless nesting"],
)
def test_a_foreign_file_is_none(folder: Path, raw: bytes):
    """Nothing that it says is believed, and nothing of that size is read."""
    slot_path(folder, 3, 0).write_bytes(raw)
    assert sealed_in(folder) == []


def test_a_link_or_another_ranks_file_is_none(folder: Path, tmp_path: Path):
    """A link may lead anywhere; a copy under another rank's name is not that rank's state."""
    written(folder, 1)
    slot_path(folder, 3, 0).rename(tmp_path / "elsewhere")
    slot_path(folder, 3, 0).symlink_to(tmp_path / "elsewhere")
    slot_path(folder, 4, 0).write_bytes((tmp_path / "elsewhere").read_bytes())
    assert sealed_in(folder) == []


def test_what_is_no_longer_to_be_used_is_not_listed(folder: Path):
    """The other slot still is."""
    written(folder, 1)
    written(folder, 2, keep=(7, 1))
    unseal(slot_path(folder, 3, 0))
    assert versions(folder) == [2]


def test_a_snapshot_that_is_not_whole_is_offered_once(folder: Path):
    """Whoever finds it takes its seal away."""
    snapshots = Snapshots(folder, 0, 1)
    written(folder, 1)
    raw = bytearray(slot_path(folder, 3, 0).read_bytes())
    raw[-1] ^= 1
    slot_path(folder, 3, 0).write_bytes(raw)
    assert [each.version for each in snapshots.sealed()] == [1]
    assert snapshots.open(3, generation=7, version=1) is None
    assert snapshots.sealed() == ()


def no_room(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room_is_told_at_the_start_and_survived_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Memory is taken when a layout is prepared; a rank that gets none later trains on."""
    snapshots = Snapshots(folder, 3, 1)
    kinds = kinds_of(1)
    manifest = manifest_of(3, 7, 1, 1, kinds[0])
    monkeypatch.setattr(slots_module.os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        snapshots.reserve(manifest)
    snapshots.begin(manifest, kinds)
    snapshots.finish()
    assert "No space" in snapshots.refusal
    assert snapshots.sealed() == ()
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    snapshots.allow()
    snapshots.begin(manifest, kinds)
    assert [each.version for each in snapshots.sealed()] == [1]


def test_state_that_was_gone_back_to_stays_until_a_newer_one_is_sealed(folder: Path):
    """The version that was left behind is the one that is written over."""
    snapshots = Snapshots(folder, 3, 1)
    for version in (1, 2):
        kinds = kinds_of(version)
        snapshots.begin(manifest_of(3, 7, version, version, kinds[0]), kinds)
    snapshots.finish()
    snapshots.settle(7, 1)
    kinds = kinds_of(9)
    snapshots.begin(manifest_of(3, 8, 1, 1, kinds[0]), kinds)
    assert [(each.generation, each.version) for each in snapshots.sealed()] == [(7, 1), (8, 1)]


def test_others_are_removed_ours_stay(folder: Path):
    """Once all run a newer layout nobody needs a lost rank's state."""
    for rank in (1, 3):
        written(folder, 1, rank=rank)
    slot_path(folder, 1, 1).touch()
    Snapshots(folder, 0, 1).remove_all_but({0, 3})
    assert [path.name for path in folder.iterdir()] == ["rank3.0"]


def test_a_manifest_says_what_it_holds():
    """Names and shapes in the order of the bytes."""
    manifest = manifest_of(1, 2, 3, 4, kinds_of(0)[0])
    assert manifest == Manifest(
        rank=1, generation=2, version=3, updates=4, tensors=tuple(SHAPES.items())
    )
