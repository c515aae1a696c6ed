"""The CPU as a device: a thread for each stream, sockets for the wire, gloo for collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resihp.executor.groups import GroupFactory
from resihp.executor.stream import ThreadStream
from resihp.executor.transport import Transport
from resihp.wire.address import LOOPBACK
from resihp.wire.backend import EXECUTOR_TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from resihp.executor.device.interface import Groups
    from resihp.ir.model import Plan
    from resihp.wire.address import Address

__all__ = ["CpuDevice"]


class CpuDevice:
    """See `resihp.executor.device.interface.Device`."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    transport = EXECUTOR_TRANSPORT

    def __init__(self, job: str, rank: int, *, timeout_s: float, host: str = LOOPBACK) -> None:
        """`timeout_s` bounds the connecting to a peer; all listen at `host` only."""
        self.host = host
        self.compute = ThreadStream("compute")
        self.comm = ThreadStream("comm")
        self.wire = Transport(job, rank, timeout_s=timeout_s, host=host)

    async def open(self) -> Address:
        """See `Device`."""
        return await self.wire.open()

    def begin(self, generation: int, key: bytes, peers: Mapping[int, Address]) -> None:
        """See `Device`."""
        self.wire.begin(generation, key, peers)

    async def connect(self, peers: AbstractSet[int]) -> None:
        """See `Device`."""
        await self.wire.connect(peers)

    def end(self) -> None:
        """See `Device`."""
        self.wire.end()

    def groups(
        self, store: Address, generation: int, rank: int, *, connect_s: float, collective_s: float
    ) -> GroupFactory:
        """See `Device`."""
        return GroupFactory(
            store, generation, rank, self.host, connect_s=connect_s, collective_s=collective_s
        )

    def link(self, groups: Groups, plan: Plan) -> None:
        """See `Device`: sockets need no more than `connect`."""
