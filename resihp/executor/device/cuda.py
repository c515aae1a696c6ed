"""CUDA: streams with events, NCCL for collectives and between stages, one GPU per rank.

    compute thread --issues--> compute stream --event--> stream of an edge --NCCL--> peer
    comm thread    --issues--> comm stream

The threads issue and never wait for the device on the way (see `issuing`), but for the vote, which
reads the norms of the reduced gradients once per step, on the comm thread. Sends and receives go
to a communicator and a stream per directed pair of ranks (`edges`), which makes the transport
`edge`. State moves between generations over the CPU's wire, through host memory.

Where several ranks share a GPU NCCL refuses to work. Then everything goes through pinned host
memory, the CPU's wire and gloo (`staged`): to check the control plane on one GPU, not to be fast.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from resihp.errors import CommError, ConfigError, GenerationClosed
from resihp.executor.device.edge_wire import EdgeWire, KeptQueues
from resihp.executor.device.edges import MAX_CONNECTIONS, Edge, check_edges, plan_edges
from resihp.executor.device.interface import STATE, Tag
from resihp.executor.device.issuing import IssuingStream, Mark
from resihp.executor.device.nccl import NcclCommunicator, abort_all, new_unique_id
from resihp.executor.device.staged import StagedGroups, StagedWire
from resihp.executor.stream import Event
from resihp.executor.transport import Transport
from resihp.wire.address import LOOPBACK, Address, interface_of
from resihp.wire.backend import EXECUTOR_TRANSPORT

if TYPE_CHECKING:
    from resihp.executor.device.interface import Communicator, Groups, Wire
    from resihp.ir.model import Plan

__all__ = ["CudaDevice", "CudaQueue", "NcclGroups", "give_streams_connections"]

EDGE_CTAS = 4
"""Multiprocessors that a message may take, also while it waits: there are many pairs on a rank."""


def give_streams_connections() -> None:
    """Let streams run apart from each other; before CUDA starts in this process.

    By default a device has 8 connections from the host, and an environment made for other programs
    may say 1. Streams that share one are in one order: a message that is not here holds up compute.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(MAX_CONNECTIONS)


class CudaClock:
    """A device's clock, told on the host's monotonic one."""

    def __init__(self, device: torch.device) -> None:
        self._met = self._meeting(torch.cuda.Stream(device))

    def meet_host(self, stream: torch.cuda.Stream) -> None:
        """Compare the two, on an idle stream, if the last time is long ago. Any thread."""
        if time.monotonic_ns() - self._met[1] > _MEET_AGAIN_NS:
            self._met = self._meeting(stream)

    def _meeting(self, stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, int]:
        """A moment on both clocks: the best of a few looks, exact to some microseconds."""
        return min((_look(stream) for _ in range(_NUM_LOOKS)), key=lambda look: look[2])[:2]

    def at_ns(self, event: torch.cuda.Event) -> int:
        """When `event` was reached, before or after the meeting.

        Elapsed times are single floats: near a meeting of the last second they are exact to a
        tenth of a microsecond.
        """
        met, met_ns = self._met
        return met_ns + round(met.elapsed_time(event) * 1e6)


_MEET_AGAIN_NS = 1_000_000_000
"""Clocks drift apart by tens of microseconds in it."""
_NUM_LOOKS = 3


def _look(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, int, int]:
    """An event, its host time at half-way, and how far that may be off."""
    before_ns = time.monotonic_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    event.synchronize()
    after_ns = time.monotonic_ns()
    return event, (before_ns + after_ns) // 2, after_ns - before_ns


@cache
def _clock_of(device: torch.device) -> CudaClock:
    return CudaClock(device)


class _CudaMark:
    """See `Mark`."""

    __slots__ = ("_clock", "event")

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        # Blocking: a thread that waits for the mark sleeps instead of spinning.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)

    def query(self) -> bool:
        """See `Mark`."""
        return self.event.query()

    def synchronize(self) -> None:
        """See `Mark`."""
        self.event.synchronize()

    def at_ns(self) -> int:
        """See `Mark`."""
        return self._clock.at_ns(self.event)


class CudaQueue:
    """A CUDA stream as a `DeviceQueue`."""

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """`is_urgent`: its kernels go first where several streams have some."""
        self.stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0)
        self._clock = _clock_of(device)

    def active(self) -> AbstractContextManager[Any]:
        """See `DeviceQueue`. It also makes the device the thread's current one."""
        return torch.cuda.stream(self.stream)

    def record(self) -> _CudaMark:
        """See `DeviceQueue`."""
        mark = _CudaMark(self._clock)
        mark.event.record(self.stream)
        return mark

    def wait(self, mark: Mark) -> None:
        """See `DeviceQueue`."""
        self.stream.wait_event(cast("_CudaMark", mark).event)

    def uses(self, result: Any) -> None:
        """See `DeviceQueue`."""
        if isinstance(result, Tensor) and result.is_cuda:
            result.record_stream(self.stream)

    def meet_host(self) -> None:
        """See `DeviceQueue`."""
        self._clock.meet_host(self.stream)

    def synchronize(self) -> None:
        """See `DeviceQueue`."""
        self.stream.synchronize()


class _NcclLink:
    """This rank's end of a directed pair (see `edge_wire.Link`)."""

    def __init__(self, queue: CudaQueue, communicator: NcclCommunicator) -> None:
        self.queue = queue
        self._communicator = communicator
        self._peer = 1 - communicator.index

    def send(self, tensor: Tensor) -> None:
        """See `Link`."""
        self._communicator.send(tensor, self._peer)

    def receive(self, num_bytes: int) -> Tensor:
        """See `Link`."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.queue.stream.device)
        self._communicator.receive_(buffer, self._peer)
        return buffer

    def greet(self) -> None:
        """Exchange one byte: NCCL connects at the first message, and blocks the host until then."""
        with self.queue.active():
            if self._communicator.index == 0:
                self.send(torch.zeros(1, dtype=torch.uint8, device=self.queue.stream.device))
            else:
                self.receive(1)
            self.queue.synchronize()


class _Alone:
    """The communicator of a single rank."""

    index = 0
    degree = 1

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def all_reduce_(self, tensor: Tensor) -> None:
        """See `Communicator`."""

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Communicator`."""
        return part.unsqueeze(0)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Communicator`."""
        return [parts[0]]


def _keep_nccl_at(host: str) -> None:
    """NCCL listens on the first interface that is not loopback, unless it is told another one."""
    name = interface_of(host)
    if name is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


class NcclGroups:
    """The communicators of one generation (see `interface.Groups`), collective and of edges."""

    def __init__(
        self, device: torch.device, at: Address, generation: int, rank: int, *, connect_s: float
    ) -> None:
        self._device = device
        self._rank = rank
        self._connect_s = connect_s
        self._built: list[NcclCommunicator] = []
        self._is_over = False
        try:
            store = TCPStore(
                at.host,
                at.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=connect_s),
            )
        except RuntimeError as error:
            raise CommError(f"the store of generation {generation} is gone: {error}") from error
        self._store: Any = PrefixStore(f"g{generation}/nccl", store)

    def build(self, name: str, ranks: Sequence[int]) -> Communicator:
        """See `Groups`."""
        if len(ranks) == 1:
            return _Alone(ranks)
        return self._nccl(name, ranks)

    def link(self, edge: Edge, queue: CudaQueue) -> _NcclLink:
        """This rank's end of a pair, connected. Blocks until the other rank comes to it."""
        communicator = self._nccl(edge.name, edge, max_ctas=EDGE_CTAS)
        with torch.cuda.device(self._device):
            link = _NcclLink(queue, communicator)
            link.greet()
        return link

    def _nccl(
        self, name: str, ranks: Sequence[int], *, max_ctas: int | None = None
    ) -> NcclCommunicator:
        if self._is_over:
            raise GenerationClosed("the generation is over")
        index = list(ranks).index(self._rank)
        try:
            if index == 0:
                self._store.set(name, new_unique_id())
            unique_id = bytes(self._store.get(name))
        except RuntimeError as error:
            raise CommError(f"group {name} over ranks {list(ranks)} failed: {error}") from error
        with torch.cuda.device(self._device):
            made = NcclCommunicator(
                unique_id, ranks, index, timeout_s=self._connect_s, max_ctas=max_ctas
            )
            self._built.append(made)
            if self._is_over:  # `abort` may have missed it
                made.abort()
            made.connect()
        return made

    def abort(self) -> None:
        """See `Groups`."""
        self._is_over = True
        abort_all(list(self._built))

    def release(self) -> None:
        """See `Groups`. What is not complete is aborted: a generation ends with its iterations."""
        self._is_over = True
        for thread in abort_all(self._built):
            thread.join()
        self._built.clear()
        self._store = None


class _CudaWire:
    """Tensors over the pairs' queues, state over the CPU's wire."""

    def __init__(self, edges: EdgeWire, staged: StagedWire) -> None:
        self._edges = edges
        self._staged = staged

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""
        wire = self._staged if tag.kind == STATE else self._edges
        return wire.send(peer, tag, source, cut)

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`."""
        wire = self._staged if tag.kind == STATE else self._edges
        return wire.receive(peer, tag, num_bytes)


class CudaDevice:
    """See `resihp.executor.device.interface.Device`."""

    kind = "cuda"
    transport = EXECUTOR_TRANSPORT

    def __init__(
        self,
        job: str,
        rank: int,
        *,
        timeout_s: float,
        num_local_ranks: int,
        staged: bool = False,
        host: str = LOOPBACK,
    ) -> None:
        """`num_local_ranks` share the GPUs of this host; more of them than GPUs are staged.

        ConfigError where there is no GPU.
        """
        give_streams_connections()
        _keep_nccl_at(host)
        if not torch.cuda.is_available():
            raise ConfigError(
                '[device] kind = "cuda": torch sees no CUDA device on this host; '
                'nearest valid: "cpu"'
            )
        num_gpus = torch.cuda.device_count()
        self.is_staged = staged or num_local_ranks > num_gpus
        self.torch_device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(self.torch_device)  # of this thread: the event loop's
        self.compute = IssuingStream("compute", CudaQueue(self.torch_device))
        self.comm = IssuingStream("comm", CudaQueue(self.torch_device, is_urgent=True))
        self._transport = Transport(job, rank, timeout_s=timeout_s, host=host)
        self._staging = StagedWire(
            self._transport,
            lambda name: IssuingStream(name, CudaQueue(self.torch_device)),
            self.torch_device,
        )
        self.host = host
        self._rank = rank
        self._edges: EdgeWire | None = None
        self._edge_queues = KeptQueues(lambda: CudaQueue(self.torch_device, is_urgent=True))

    async def open(self) -> Address:
        """See `Device`."""
        return await self._transport.open()

    def begin(self, generation: int, key: bytes, peers: Mapping[int, Address]) -> None:
        """See `Device`."""
        self._staging.begin()
        self._transport.begin(generation, key, peers)

    async def connect(self, peers: AbstractSet[int]) -> None:
        """See `Device`."""
        await self._transport.connect(peers)

    def end(self) -> None:
        """See `Device`."""
        if self._edges is not None:
            self._edges.end()
            self._edges = None
        self._transport.end()
        self._staging.end()

    @property
    def wire(self) -> Wire:
        """See `Device`."""
        if self._edges is None:
            return self._staging
        return _CudaWire(self._edges, self._staging)

    def groups(
        self, store: Address, generation: int, rank: int, *, connect_s: float, collective_s: float
    ) -> Groups:
        """See `Device`."""
        if self.is_staged:
            return StagedGroups(
                store, generation, rank, self.host, connect_s=connect_s, collective_s=collective_s
            )
        return NcclGroups(self.torch_device, store, generation, rank, connect_s=connect_s)

    def link(self, groups: Groups, plan: Plan) -> None:
        """See `Device`."""
        if not isinstance(groups, NcclGroups):
            return
        edges = plan_edges(plan)
        check_edges(edges)
        mine = [edge for edge in edges if self._rank in edge]
        queues = self._edge_queues.first(len(mine))
        links = {edge: groups.link(edge, queue) for edge, queue in zip(mine, queues, strict=True)}
        self._edges = EdgeWire(
            self.compute,
            {edge.target: link for edge, link in links.items() if edge.source == self._rank},
            {edge.source: link for edge, link in links.items() if edge.target == self._rank},
        )
