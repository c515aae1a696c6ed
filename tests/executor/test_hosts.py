"""[T30] An executor whose node has no such address says so itself, whatever its rank."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import msgspec
import pytest
from layouts import job_of

from resihp.config import DeviceConfig, resolved
from resihp.ir.model import Mesh
from resihp.wire.channel import Channel
from resihp.wire.messages import Start

MESH = Mesh(tp=1, pp=2, dp=2)


async def _start(ours: socket.socket, rank: int, host: str) -> None:
    job = msgspec.structs.replace(job_of(MESH), device=DeviceConfig(kind="emulated"))
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    channel = Channel(reader, writer)
    channel.send(Start(rank=rank, job=resolved(job), host=host))
    await channel.receive()
    channel.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("rank", "host", "words"),
    [
        (
            0,
            "198.51.100.7",
            "198.51.100.7 is no address of this machine; name one of its interfaces",
        ),
        (2, "nowhere.invalid", 'the address "nowhere.invalid" cannot be found'),
        (3, "0.0.0.0", '"0.0.0.0" stands for every interface of this machine'),
    ],
)
def test_an_address_that_is_not_ours(rank: int, host: str, words: str):
    """One sentence, exit status 2, no traceback."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "resihp.executor", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    asyncio.run(_start(ours, rank, host))
    _, said = process.communicate(timeout=50)
    assert process.returncode == 2
    assert words in said
    assert "Traceback" not in said
