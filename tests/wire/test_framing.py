"""Frames: a length is untrusted input, and a torn frame is the end of the stream."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import FrameError
from resihp.wire.channel import read_frame
from resihp.wire.framing import CONTROL_LIMIT_BYTES, HEADER_BYTES, frame, frame_length


def fed(data: bytes) -> asyncio.StreamReader:
    """A stream that brought `data` and ended."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def frames_of(data: bytes, limit_bytes: int) -> list[bytes]:
    """All whole frames of a stream."""
    reader = fed(data)
    found: list[bytes] = []
    while (payload := await read_frame(reader, limit_bytes=limit_bytes)) is not None:
        found.append(payload)
    return found


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_frames_come_back_as_they_were_sent(payloads: list[bytes]):
    """Any payloads, empty ones too, in their order."""
    stream = b"".join(map(frame, payloads))
    assert asyncio.run(frames_of(stream, 64)) == payloads


@given(st.lists(st.binary(min_size=1, max_size=16), min_size=1, max_size=4), st.data())
def test_a_torn_frame_is_the_end_of_the_stream(payloads: list[bytes], data: st.DataObject):
    """A peer that dies inside a frame leaves the whole frames before it, and then None."""
    stream = b"".join(map(frame, payloads))
    cut = data.draw(st.integers(0, len(stream) - 1))
    sizes = [HEADER_BYTES + len(payload) for payload in payloads]
    whole = sum(sum(sizes[: n + 1]) <= cut for n in range(len(sizes)))
    assert asyncio.run(frames_of(stream[:cut], 64)) == payloads[:whole]


@pytest.mark.parametrize("length", [CONTROL_LIMIT_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_above_the_limit_is_refused_before_anything_is_read(length: int):
    """[S2] Only the header was there: waiting for such a payload would be the end of our memory."""
    header = struct.pack("!I", length)
    with pytest.raises(FrameError, match=f"{length} bytes, the limit is {CONTROL_LIMIT_BYTES}"):
        frame_length(header)

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(header)  # and no end of the stream: whoever reads on hangs
        async with asyncio.timeout(5):
            await read_frame(reader, limit_bytes=CONTROL_LIMIT_BYTES)

    with pytest.raises(FrameError):
        asyncio.run(read())


def test_the_limit_itself_is_allowed():
    """A frame as long as the limit is sent and read; one byte more is neither."""
    assert asyncio.run(frames_of(frame(b"x" * 8, limit_bytes=8), 8)) == [b"x" * 8]
    with pytest.raises(FrameError, match="9 bytes is above the limit of 8"):
        frame(b"x" * 9, limit_bytes=8)
