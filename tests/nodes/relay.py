"""A relay of packets: `relay.py DEVICE DELAY_S LOSS SEED`, in the router's namespace.

Makes the tun device DEVICE. What the kernel sends there comes back from there after DELAY_S
(in order), save a share LOSS of it. For kernels without netem.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import struct
import sys

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 1 << 16


def open_device(name: str) -> int:
    """A new tun device in the namespace of this process."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


async def relay(fd: int, delay_s: float, loss: float, rng: random.Random) -> None:
    """Until the process is killed."""
    loop = asyncio.get_running_loop()

    def forward(packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # the queue is full: one more lost packet
            os.write(fd, packet)

    def readable() -> None:
        packet = os.read(fd, _PACKET_BYTES)
        if rng.random() >= loss:
            loop.call_later(delay_s, forward, packet)

    loop.add_reader(fd, readable)
    await asyncio.Event().wait()


def main() -> None:
    """See the module."""
    name, delay_s, loss, seed = sys.argv[1:]
    fd = open_device(name)
    print("ready", flush=True)
    asyncio.run(relay(fd, float(delay_s), float(loss), random.Random(int(seed))))


if __name__ == "__main__":
    main()
