"""A relay of connections: `slow_relay.py HOST PORT TARGET_HOST DELAY_S`.

What comes to HOST goes on to the same port of TARGET_HOST, either way DELAY_S later. At SIGUSR1 it
drops all connections, as soon as there is one, and prints how many.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SlowRelay", "slow_relay"]

READY = "ready\n"


class SlowRelay:
    """The process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def drop(self) -> int:
        """Break all connections; how many there were, at least one."""
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@contextmanager
def slow_relay(host: str, port: int, target: str, delay_s: float) -> Iterator[SlowRelay]:
    """A relay in the background."""
    words = [sys.executable, __file__, host, str(port), target, str(delay_s)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == READY
        try:
            yield SlowRelay(process)
        finally:
            process.kill()


class _Relay:
    def __init__(self, port: int, target: str, delay_s: float) -> None:
        self._port, self._target, self._delay_s = port, target, delay_s
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_to_drop = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection(self._target, self._port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, onward[1]}
        self._writers |= ends
        if self._is_to_drop:
            self.drop()
        try:
            await asyncio.gather(self._pump(reader, onward[1]), self._pump(onward[0], writer))
        except OSError:
            pass  # dropped, by us or by an end
        finally:
            self._writers -= ends
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def forward(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data)

        while data := await reader.read(1 << 16):
            loop.call_later(self._delay_s, forward, data)
        await asyncio.sleep(self._delay_s)
        writer.close()

    def drop(self) -> None:
        """Now, or the next connection that comes."""
        self._is_to_drop = not self._writers
        if self._writers:
            print(len(self._writers) // 2, flush=True)
        for writer in self._writers:
            writer.transport.abort()


async def _serve(host: str, port: int, target: str, delay_s: float) -> None:
    relay = _Relay(port, target, delay_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, relay.drop)
    async with await asyncio.start_server(relay.connected, host, port) as server:
        print(READY, end="", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
