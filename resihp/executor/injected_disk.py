"""The disk of saved versions as injected faults have it: full, or torn in the middle of a file."""

from __future__ import annotations

from resihp.checkpoint.disk import Disk
from resihp.executor.faults import Conditions

__all__ = ["InjectedDisk"]


class InjectedDisk(Disk):
    """`Disk` under the conditions of a process."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions

    def mkdir(self, name: str, folder: int) -> None:
        """See `Disk`. OSError (ENOSPC) where the disk is full by order."""
        self._conditions.check_disk()
        super().mkdir(name, folder)

    def create(self, name: str, folder: int) -> int:
        """See `Disk`. OSError (ENOSPC) where the disk is full by order."""
        self._conditions.check_disk()
        return super().create(name, folder)

    def write(self, file: int, block: memoryview) -> int:
        """See `Disk`. OSError (ENOSPC) where the disk is full; death half-way where so ordered."""
        self._conditions.check_disk()
        self._conditions.tear(
            lambda: super(InjectedDisk, self).write(file, block[: len(block) // 2])
        )
        return super().write(file, block)
