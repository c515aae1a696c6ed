"""File operations of a save, each inside one directory that is held open, none through a link.

`Disk` is every operation that changes something, so that a test can count them and end the
process at any one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from resihp.errors import CheckpointRefused

__all__ = ["Disk", "Folder", "open_folder"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """What changes a disk. All paths are names inside the directory of a descriptor."""

    def mkdir(self, name: str, folder: int) -> None:
        """Make a directory that only we may enter."""
        os.mkdir(name, 0o700, dir_fd=folder)

    def create(self, name: str, folder: int) -> int:
        """A new file that only we may read; FileExistsError where there is one already."""
        return os.open(name, _NEW, 0o600, dir_fd=folder)

    def write(self, file: int, block: memoryview) -> int:
        """Some of `block`; how many bytes."""
        return os.write(file, block)

    def sync(self, descriptor: int) -> None:
        """The file's bytes, or the directory's names, are on the disk."""
        os.fsync(descriptor)

    def rename(self, name: str, new: str, folder: int) -> None:
        """Within a directory, replacing what is there."""
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, name: str, folder: int) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=folder)

    def rmdir(self, name: str, folder: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=folder)


class Folder:
    """An open directory. OSError from all methods, and CheckpointRefused where it is said."""

    def __init__(self, descriptor: int, path: Path, disk: Disk) -> None:
        self._descriptor = descriptor
        self._disk = disk
        self.path = path

    def names(self) -> list[str]:
        """What is in it, sorted."""
        return sorted(os.listdir(self._descriptor))

    @contextmanager
    def inside(self, name: str) -> Generator[Folder]:
        """A directory in it, which must be none by a link."""
        descriptor = os.open(name, _READ | os.O_DIRECTORY, dir_fd=self._descriptor)
        try:
            yield Folder(descriptor, self.path / name, self._disk)
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def make(self, name: str) -> bool:
        """Make a directory in it, on disk before this returns; False where there is one."""
        try:
            self._disk.mkdir(name, self._descriptor)
        except FileExistsError:
            return False
        self.sync()
        return True

    def write_new(self, name: str, blocks: Iterable[bytes | memoryview]) -> int:
        """A new file of these blocks, on disk before this returns; its size in bytes.

        The name is on disk after `sync`. What could not be written whole is removed.
        """
        file = self._disk.create(name, self._descriptor)
        try:
            size = 0
            for block in blocks:
                size += self._write_all(file, memoryview(block).cast("B"))
            self._disk.sync(file)
        except BaseException:
            self._disk.unlink(name, self._descriptor)
            raise
        finally:
            os.close(file)
        return size

    def _write_all(self, file: int, block: memoryview) -> int:
        rest = block
        while rest:
            rest = rest[self._disk.write(file, rest) :]
        return len(block)

    def rename(self, name: str, new: str) -> None:
        """Within it, replacing what is there; on disk after `sync`."""
        self._disk.rename(name, new, self._descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file; on disk after `sync`."""
        self._disk.unlink(name, self._descriptor)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory in it."""
        self._disk.rmdir(name, self._descriptor)

    def sync(self) -> None:
        """All names in it are on disk."""
        self._disk.sync(self._descriptor)

    def read_small(self, name: str, limit_bytes: int) -> bytes:
        """A whole file; CheckpointRefused where it is missing, no plain file, or above the limit.

        The size is looked at before anything is allocated.
        """
        with self.reading(name) as file:
            size = os.fstat(file).st_size
            if size > limit_bytes:
                raise CheckpointRefused(
                    f"{self.path / name}: {size} bytes, above the limit of {limit_bytes}"
                )
            found = os.pread(file, size, 0)
        if len(found) != size:
            raise CheckpointRefused(f"{self.path / name}: could not be read whole")
        return found

    @contextmanager
    def reading(self, name: str) -> Generator[int]:
        """A descriptor of a plain file; CheckpointRefused where it is missing or something else."""
        try:
            file = os.open(name, _READ, dir_fd=self._descriptor)
        except OSError as error:  # ELOOP: a link
            raise CheckpointRefused(f"{self.path / name}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise CheckpointRefused(f"{self.path / name}: not a plain file")
            yield file
        finally:
            os.close(file)


@contextmanager
def open_folder(path: Path, disk: Disk | None = None) -> Generator[Folder]:
    """`path` as a Folder; the path itself is the user's and may lead through links."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Folder(descriptor, path, disk or Disk())
    finally:
        os.close(descriptor)
