"""The snapshots of one generation on one rank: from the layout that it joins with to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from resihp.executor.device.interface import Device
from resihp.executor.model import Model, shapes_of
from resihp.executor.snapshots.buddies import Buddies
from resihp.executor.state import TrainState
from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.wire.address import Address
from resihp.wire.messages import NoBuddyCopy

__all__ = ["GenerationSnapshots"]


class GenerationSnapshots:
    """Secures the state before this rank joins, and has copies made while it iterates."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        state: TrainState,
        device: Device,
        peers: Mapping[int, Address],
        *,
        wants_buddy: bool,
        tell: Callable[[NoBuddyCopy], None],
    ) -> None:
        """`tell` is called where there are no copies though there should be."""
        self._model = model
        self._plan = plan
        self._state = state
        self._device = device
        self._hosts = {rank: peers[rank].host for rank in plan.active_ranks}
        self._wants_buddy = wants_buddy
        self._tell = tell
        self._buddies: Buddies | None = None
        self._serving: asyncio.Task[None] | None = None

    async def secure(self) -> None:
        """Seal what was prepared, here and with the buddy. Raises as `TrainState.secure` and
        `Buddies.exchange` do."""
        secured = await self._device.comm.submit(self._state.secure).wait_async()
        self._buddies = self._made()
        if self._buddies is not None and secured is not None:
            await self._device.connect(self._buddies.peers)
            await self._buddies.exchange(*secured)

    def _made(self) -> Buddies | None:
        """None where there is no other node, or the device's wire cannot carry copies."""
        snapshots, device = self._state.snapshots, self._device
        if snapshots is None or not self._wants_buddy or len(set(self._hosts.values())) < 2:
            return None
        if device.kind != "cpu":  # NCCL matches messages by order, and copies have none
            return None
        return Buddies(snapshots, lambda: device.wire, self._hosts, self._shapes, self._tell)

    def _shapes(self, rank: int) -> list[tuple[str, tuple[int, ...]]]:
        return list(shapes_of(self._model, expand(self._plan, rank)).items())

    async def begin(self) -> None:
        """All run this layout: from here on snapshots are copied, and what nobody needs any more
        is removed."""
        snapshots, buddies = self._state.snapshots, self._buddies
        if snapshots is None:
            return
        near = self._plan.active_ranks if buddies is None else buddies.near
        await asyncio.to_thread(partial(snapshots.remove_all_but, near))
        if buddies is not None:
            snapshots.on_begin = buddies.begun
            self._serving = asyncio.create_task(buddies.serve())

    def end(self) -> None:
        """The generation is over; nobody waits for a copy any longer."""
        if self._state.snapshots is not None:
            self._state.snapshots.on_begin = None
        if self._buddies is not None:
            self._buddies.stop()
        if self._serving is not None:
            self._serving.cancel()
