"""Disks that fail: at the n-th operation the process dies, the power goes, or an error comes."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from resihp.checkpoint.disk import Disk


class CountingDisk(Disk):
    """Counts operations and calls `strike` before the n-th."""

    def __init__(self, last: int = -1) -> None:
        self.done: list[str] = []
        """Kind of each operation."""
        self._last = last

    def strike(self) -> None:
        raise NotImplementedError

    def _count(self, kind: str) -> None:
        if len(self.done) == self._last:
            self.strike()
        self.done.append(kind)

    def mkdir(self, name: str, folder: int) -> None:
        self._count("mkdir")
        super().mkdir(name, folder)

    def create(self, name: str, folder: int) -> int:
        self._count("create")
        return super().create(name, folder)

    def write(self, file: int, block: memoryview) -> int:
        self._count("write")
        is_short = len(self.done) % 5 == 0  # as any write may be
        return super().write(file, block[: len(block) // 2 + 1] if is_short else block)

    def sync(self, descriptor: int) -> None:
        self._count("sync")
        super().sync(descriptor)

    def rename(self, name: str, new: str, folder: int) -> None:
        self._count("rename")
        super().rename(name, new, folder)

    def unlink(self, name: str, folder: int) -> None:
        self._count("unlink")
        super().unlink(name, folder)

    def rmdir(self, name: str, folder: int) -> None:
        self._count("rmdir")
        super().rmdir(name, folder)


class DyingDisk(CountingDisk):
    """SIGKILL to the own process."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class BrokenDisk(CountingDisk):
    """One error, as of a full or broken disk; what comes after it works."""

    def __init__(self, last: int, code: int) -> None:
        super().__init__(last)
        self._code = code

    def strike(self) -> None:
        raise OSError(self._code, os.strerror(self._code))


class PowerCut(BaseException):
    """Nothing works any more."""


class LossyDisk(CountingDisk):
    """The power goes; `settle` then leaves of what was not synced whatever chance says.

    Bytes of a file that was not synced may be missing or zero. Names that were made, changed or
    removed since their directory was synced may be as they were, each by itself.
    """

    def __init__(self, last: int, chosen: random.Random) -> None:
        super().__init__(last)
        self._chosen = chosen
        self._is_dead = False
        self._unsynced: dict[int, Path] = {}
        self._undo: list[tuple[Path, Callable[[], None]]] = []
        """Directory of each change of names, and what takes it back."""

    def strike(self) -> None:
        self._is_dead = True

    def _count(self, kind: str) -> None:
        super()._count(kind)
        if self._is_dead:
            raise PowerCut

    def mkdir(self, name: str, folder: int) -> None:
        super().mkdir(name, folder)
        path = _path(folder) / name
        self._undo.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def create(self, name: str, folder: int) -> int:
        file = super().create(name, folder)
        path = _path(folder) / name
        self._unsynced[file] = path
        self._undo.append((path.parent, lambda: path.unlink(missing_ok=True)))
        return file

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._unsynced.pop(descriptor, None)
        folder = _path(descriptor)
        self._undo = [each for each in self._undo if each[0] != folder]

    def rename(self, name: str, new: str, folder: int) -> None:
        super().rename(name, new, folder)
        old, path = _path(folder) / name, _path(folder) / new

        def back() -> None:
            if path.exists():
                path.rename(old)

        self._undo.append((path.parent, back))

    def unlink(self, name: str, folder: int) -> None:
        path = _path(folder) / name
        content = path.read_bytes()
        super().unlink(name, folder)

        def back() -> None:
            if path.parent.exists():
                path.write_bytes(content)

        self._undo.append((path.parent, back))

    def rmdir(self, name: str, folder: int) -> None:
        path = _path(folder) / name
        super().rmdir(name, folder)
        self._undo.append((path.parent, lambda: path.mkdir(exist_ok=True)))

    def settle(self) -> None:
        """What is on the disk when the power is back."""
        for path in self._unsynced.values():
            if path.exists():
                size = path.stat().st_size
                kept = self._chosen.randint(0, size)
                path.write_bytes(path.read_bytes()[:kept] + bytes(self._chosen.choice([0, size])))
        for _, back in reversed(self._undo):
            if self._chosen.random() < 0.5:
                back()


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
