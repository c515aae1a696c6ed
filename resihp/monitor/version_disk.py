"""What the coordinator wants done to saved versions, on a thread, one thing after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from resihp.monitor.actions import CompleteVersion, DropVersion
from resihp.monitor.checkpoints import complete_version, drop

__all__ = ["VersionDisk"]


class VersionDisk:
    """The directory of versions; `done` is told of each version that was to be completed."""

    def __init__(
        self, directory: str, keep: int, done: Callable[[str, str, Sequence[str]], None]
    ) -> None:
        """`done(name, trouble, pruned)`: '' is no trouble, `pruned` are versions that are gone."""
        self._directory = Path(directory)
        self._keep = keep
        self._done = done
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def change(self, action: CompleteVersion | DropVersion) -> None:
        """Have it done soon."""
        task = asyncio.create_task(self._change(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until all of it is done, also what follows from it."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _change(self, action: CompleteVersion | DropVersion) -> None:
        async with self._turn:
            if isinstance(action, DropVersion):
                await asyncio.to_thread(drop, self._directory, action.name)
                return
            completing = partial(
                complete_version,
                self._directory,
                action.name,
                action.manifest,
                keep=self._keep,
                spared=action.spared,
            )
            trouble, pruned = await asyncio.to_thread(completing)
        self._done(action.name, trouble, pruned)
