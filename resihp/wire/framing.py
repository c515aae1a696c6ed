"""Length-limited frames: a 4-byte big-endian length, then that many bytes.

The limit is checked before anything is allocated, since a length is untrusted input.
"""

from __future__ import annotations

import struct

from resihp.errors import FrameError

__all__ = ["CONTROL_LIMIT_BYTES", "HEADER_BYTES", "HELLO_LIMIT_BYTES", "frame", "frame_length"]

_HEADER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size

HELLO_LIMIT_BYTES = 256
"""Largest frame that an unauthenticated peer may send."""
CONTROL_LIMIT_BYTES = 8 << 20
"""Largest control frame; it holds two plans as text."""


def frame(payload: bytes, *, limit_bytes: int = CONTROL_LIMIT_BYTES) -> bytes:
    """`payload` with its length in front; FrameError where it is above the limit."""
    if len(payload) > limit_bytes:
        raise FrameError(f"frame of {len(payload)} bytes is above the limit of {limit_bytes}")
    return _HEADER.pack(len(payload)) + payload


def frame_length(header: bytes, *, limit_bytes: int = CONTROL_LIMIT_BYTES) -> int:
    """Length that a header announces; FrameError where it is above the limit."""
    (length,) = _HEADER.unpack(header)
    if length > limit_bytes:
        raise FrameError(f"peer announces a frame of {length} bytes, the limit is {limit_bytes}")
    return length
