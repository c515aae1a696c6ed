"""Device tensors over the CPU's wire and gloo, through host memory.

For what is not on the step path (state that moves between generations), and for checks where
several ranks share one GPU. The copies wait on threads of their own; those of groups wait where
they are called, as a collective on CPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from resihp.executor.device.interface import STATE, Communicator, Tag, Wire
from resihp.executor.flat import tensor_of
from resihp.executor.groups import GroupFactory
from resihp.executor.stream import Event

if TYPE_CHECKING:
    from resihp.executor.device.issuing import IssuingStream

__all__ = ["StagedCommunicator", "StagedGroups", "StagedWire"]


class StagedWire:
    """`interface.Wire` of device tensors over `wire`, which carries host memory.

    `make_stream` makes streams, by name, that are for nothing else.
    """

    def __init__(
        self, wire: Wire, make_stream: Callable[[str], IssuingStream], device: torch.device
    ) -> None:
        self._wire = wire
        self._make_stream = make_stream
        self._down = make_stream("to host")
        self._up = make_stream("from host")
        self._device = device

    def begin(self) -> None:
        """A generation begins. A stream that is still in a copy of the last one is left to it."""
        self._down = self._fresh(self._down)
        self._up = self._fresh(self._up)

    def _fresh(self, stream: IssuingStream) -> IssuingStream:
        if not stream.is_idle:
            return self._make_stream(stream.name)
        stream.reset()
        return stream

    def end(self) -> None:
        """The generation is over, and `wire` has ended it."""
        self._down.cancel()
        self._up.cancel()

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""

        down = self._down

        def copy_to_host() -> Tensor:
            tensor: Tensor = source.wait() if cut is None else cut(source.wait())
            host = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu"
            )
            host.copy_(tensor, non_blocking=True)
            down.queue.record().synchronize()  # this thread's only work
            return host

        return self._wire.send(peer, tag, down.submit(copy_to_host, waits=[source]))

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`. State stays in host memory: whoever unpacks it copies piece by piece."""
        arrived = self._wire.receive(peer, tag, num_bytes)
        if tag.kind == STATE:
            return arrived
        up = Event()

        def deliver(copied: Event) -> None:
            if copied.error is not None:
                up.fail(copied.error)
            else:
                up.mark = copied.mark
                up.set(copied.wait())

        def copy_from_host() -> Tensor:
            return tensor_of(arrived.wait(), torch.uint8).to(self._device)

        # Messages are copied as they arrive: in the order of the program one could hold up others.
        def here(_: Event) -> None:
            if arrived.error is not None:
                up.fail(arrived.error)
            else:
                self._up.submit(copy_from_host).when_done(deliver)

        arrived.when_done(here)
        return up


class StagedCommunicator:
    """A gloo group for device tensors (see `interface.Communicator`)."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.ranks = group.ranks
        self.index = group.index
        self.degree = group.degree

    def all_reduce_(self, tensor: Tensor) -> None:
        """See `Communicator`."""
        if self.degree > 1:
            host = tensor.cpu().contiguous()
            self._group.all_reduce_(host)
            tensor.copy_(host)

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Communicator`."""
        if self.degree == 1:
            return part.unsqueeze(0)
        return self._group.all_gather(part.cpu()).to(part.device)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Communicator`."""
        if self.degree == 1:
            return [parts[0]]
        device = parts[0].device
        received = self._group.all_to_all([part.cpu() for part in parts], sizes)
        return [part.to(device) for part in received]


class StagedGroups(GroupFactory):
    """Gloo groups of device tensors (see `interface.Groups`)."""

    def build(self, name: str, ranks: Sequence[int]) -> Any:
        """See `Groups`."""
        return StagedCommunicator(super().build(name, ranks))
