"""How an executor's process keeps memory that was freed."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Options of glibc's `mallopt`."""
_MMAP_BYTES = 32 << 20
"""From this size on a block is a mapping of its own: the most that glibc allows."""


def keep_freed_memory() -> None:
    """Make the allocator keep what is freed, and hand it from one thread to another.

    An iteration allocates and frees the same blocks again and again. By default glibc gives the
    heap of a thread other than the first back to the kernel whenever its end is free, and every
    page of the next block is then faulted in and zeroed anew. Call it before threads are started.
    Does nothing where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
