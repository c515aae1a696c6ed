"""How an executor's process treats its memory."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["settle_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Options of glibc's `mallopt`."""
_MMAP_BYTES = 32 << 20
"""From this size on a block is a mapping of its own: the most that glibc allows."""


def settle_memory() -> None:
    """Keep what is freed for the next iteration, and never look for garbage among the imports.

    An iteration allocates and frees the same blocks again and again. By default glibc gives the
    heap of a thread other than the first back to the kernel whenever its end is free, and every
    page of the next block is then faulted in and zeroed anew. A full collection by Python costs
    0.1 s with torch imported. Call it when all is imported and before threads are started. Where
    the C library is not glibc its part does nothing.
    """
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
