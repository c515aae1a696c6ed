"""A save that ends anywhere: the reader finds the version before it or the new one, never a mix."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from failing_disks import BrokenDisk, CountingDisk, DyingDisk, LossyDisk, PowerCut
from layouts import idle_plan
from odd_model import ODD
from saved_layouts import held, logical_state, manifest_of, save
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from resihp.checkpoint.disk import Disk, open_folder
from resihp.checkpoint.manifest import PartFile, sha256
from resihp.checkpoint.versions import (
    check_data,
    complete,
    list_versions,
    newest_complete,
    prune,
    read_manifest,
    read_parts,
    version_name,
)
from resihp.executor.checkpoint.pieces import all_keys
from resihp.executor.checkpoint.saving import Division, Share, write_part
from resihp.executor.flat import bytes_of
from resihp.ir.model import Group, LayerRange, Mesh

LAYERS = (LayerRange(0, ODD.num_layers - 1),)
PLAN = idle_plan(Mesh(tp=2, pp=1, dp=1), [Group(replica=0, pp=0, ranks=(0, 1), layers=LAYERS)])
NAME = version_name(20, "run", 1)
SHARES: list[tuple[int, Share, dict[MetadataIndex, Tensor]]] = []
"""Of the two ranks, made once."""


def shares() -> list[tuple[int, Share, dict[MetadataIndex, Tensor]]]:
    if not SHARES:
        division = Division(ODD, PLAN)
        for rank in (0, 1):
            share = division.share(rank)
            SHARES.append((rank, share, share.copy(ODD, held(PLAN, rank, logical_state(2), 20))))
    return SHARES


def save_second(directory: Path, disk: Disk) -> None:
    """All of a save: the parts of both ranks, the marker, and the end of the version before."""
    parts: list[PartFile] = []
    for rank, share, copies in shares():
        parts.append(write_part(directory, NAME, rank, 20, share, copies, all_keys(ODD), disk=disk))
    complete(directory, NAME, manifest_of(parts, step=20, updates=20), disk)
    list(prune(directory, 1, disk=disk))


def assert_whole(directory: Path) -> int:
    """What the reader finds is one version, to the bit; its step."""
    found, troubles = newest_complete(directory)
    assert found is not None, troubles
    with open_folder(directory / found.name) as folder:
        manifest = read_manifest(folder)
        for rank, part in read_parts(folder, manifest).items():
            check_data(folder, rank, part)
            share, copies = next(each[1:] for each in shares() if each[0] == rank)
            saved = [chunk.sha256 for chunk in part.chunks]
            wanted = [sha256(bytes_of(copies[item.index])) for item in share.plan.items]
            assert (saved == wanted) == (manifest.step == 20)
    assert manifest.updates == manifest.step
    return manifest.step


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def fresh(memory: Path) -> Path:
    """A directory that holds the first version, and nothing else."""
    template, directory = memory / "first", memory / "now"
    if not template.exists():
        template.mkdir()
        save(template, PLAN, logical_state(1), step=10, updates=10, run="before")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(template, directory)
    return directory


def places(memory: Path) -> list[int]:
    """Operations of a save to end at: all of them, but of the many writes each twelfth."""
    directory, disk = fresh(memory), CountingDisk()
    save_second(directory, disk)
    assert assert_whole(directory) == 20
    assert [each.version.step for each in list_versions(directory)] == [20]
    writes = [at for at, kind in enumerate(disk.done) if kind == "write"]
    left_out = set(writes) - set(writes[::12]) - set(writes[-4:])
    assert set(disk.done) == {"mkdir", "create", "write", "sync", "rename", "unlink", "rmdir"}
    return [at for at in range(len(disk.done)) if at not in left_out]


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_process_that_dies_at_any_operation_of_a_save(memory: Path):
    """[T20] Killed before each one in turn: the version before it or the new one, whole."""
    seen: list[int] = []
    for last in places(memory):
        directory = fresh(memory)
        status = in_child(partial(save_second, directory, DyingDisk(last)))
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.append(assert_whole(directory))
    assert seen == sorted(seen), "it went back from the new version to the old one"
    assert set(seen) == {10, 20}


def test_the_next_save_clears_what_a_dead_one_left(memory: Path):
    """Torn versions go with the first complete one that is newer, wherever the save ended."""
    for last in places(memory)[::5]:
        directory = fresh(memory)
        in_child(partial(save_second, directory, DyingDisk(last)))
        save(directory, PLAN, logical_state(3), step=30, updates=30, run="after")
        list(prune(directory, 1))
        assert [path.name for path in directory.iterdir()] == [version_name(30, "after", 1)]


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_at_any_operation_of_a_save(memory: Path, seed: int):
    """[T20] What was not synced is lost by chance: still the one version or the other, whole."""
    chosen = random.Random(seed)
    seen: set[int] = set()
    for last in places(memory):
        directory = fresh(memory)
        disk = LossyDisk(last, chosen)
        with pytest.raises(PowerCut):
            save_second(directory, disk)
        disk.settle()
        seen.add(assert_whole(directory))
    assert seen == {10, 20}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_at_any_operation_of_a_save(memory: Path, code: int):
    """[T22] It is raised, the old version stays, and no half of the new one has a marker."""
    for last in places(memory):
        directory = fresh(memory)
        with pytest.raises(OSError, match=os.strerror(code)):
            save_second(directory, BrokenDisk(last, code))
        assert_whole(directory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one version."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("only root may mount a file system of its own")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path):
    """[T22] One error, no part of it stays, and the version before is whole; later it goes on."""
    save(small_disk, PLAN, logical_state(1), step=10, updates=10, run="before")
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes((free.f_bavail - 1) * free.f_bsize))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        save_second(small_disk, Disk())
    assert assert_whole(small_disk) == 10
    assert list((small_disk / NAME).iterdir()) == []
    ballast.unlink()
    save(small_disk, PLAN, logical_state(2), step=20, updates=20, run="later")
    assert assert_whole(small_disk) == 20
