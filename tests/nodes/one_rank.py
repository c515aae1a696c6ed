"""One of two ranks, each on a node of its own: `one_rank.py RANK HOST`; told what to do by lines.

Prints (rank 0: where its store listens, and) where its transport listens, reads all addresses,
sends a tensor to the other rank and sums one with it, and stays until it reads another line.
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch

from resihp.executor.device.cpu import CpuDevice
from resihp.executor.device.interface import Tag
from resihp.executor.groups import open_store
from resihp.executor.stream import Event
from resihp.wire.address import Address

BOUND_S = 40.0
TAG = Tag(kind=5, step=0, stage=0, home=0, microbatch=0, chunk=0)


def read_address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host, int(port))


async def main(rank: int, host: str) -> None:
    device = CpuDevice("nodes", rank, timeout_s=BOUND_S, host=host)
    address = await device.open()
    keep: list[object] = []
    if rank == 0:
        opened, place = open_store(BOUND_S, host)
        keep.append(opened)
        print(place, end=" ")
    print(address, flush=True)
    told = await asyncio.to_thread(sys.stdin.readline)
    store, *peers = (read_address(word) for word in told.split())
    device.begin(1, b"k" * 32, dict(enumerate(peers)))
    await device.connect({1 - rank})
    source = Event()
    source.set(torch.full((2,), rank + 1.0))
    arrived = device.wire.receive(1 - rank, TAG, 8)
    device.wire.send(1 - rank, TAG, source)

    def add() -> list[float]:
        groups = device.groups(store, 1, rank, connect_s=BOUND_S, collective_s=BOUND_S)
        keep.append(groups)
        total = torch.full((2,), rank + 1.0)
        groups.build("world", (0, 1)).all_reduce_(total)
        return total.tolist()

    total = await asyncio.to_thread(add)
    received = torch.frombuffer(await arrived.wait_async(), dtype=torch.float32).tolist()
    print(f"sum {total} received {received}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    keep.clear()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
    os._exit(0)
