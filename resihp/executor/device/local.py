"""Several ranks of one process on one device: no sockets, no gloo, no NCCL.

Every rank has streams of its own, so that on CUDA their kernels overlap. Messages are handed over
where they are, with the mark of the work that makes them. For checks and tests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.device.cuda import CudaQueue
from resihp.executor.device.interface import Communicator, Tag
from resihp.executor.device.issuing import IssuingStream
from resihp.executor.flat import used_here
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.memberships import memberships
from resihp.executor.stream import Event, ThreadStream
from resihp.ir.expand import expand

if TYPE_CHECKING:
    from resihp.executor.interpreter.observe import Observation
    from resihp.executor.model import Model
    from resihp.executor.work import Work
    from resihp.ir.model import Plan
    from resihp.ir.program import Program
    from resihp.wire.messages import StepRecord

__all__ = ["LocalRun", "MakeWork", "local_stream", "run_local"]

_MEET_S = 60.0
_Address = tuple[int, int, Tag]

MakeWork = Callable[["Program", Mapping[str, Communicator]], "Work"]
"""The work of a rank from its program and its groups by role."""


class LocalRun(NamedTuple):
    """What one rank did."""

    records: list[StepRecord]
    observation: Observation
    """Times of the last iteration."""


def local_stream(name: str, device: torch.device) -> ThreadStream:
    """A stream of the device, on a thread of its own."""
    if device.type == "cuda":
        return IssuingStream(name, CudaQueue(device))
    return ThreadStream(name)


async def run_local(
    model: Model, plan: Plan, make_work: MakeWork, num_steps: int, device: torch.device
) -> dict[int, LocalRun]:
    """All ranks of `plan`, for some iterations, in this process; what each did, by rank.

    Raises what broke the first of them.
    """
    post, groups = _Post(), _LocalGroups()
    ranks = {
        rank: await _rank(model, plan, rank, make_work, groups, post, device)
        for rank in plan.active_ranks
    }

    async def run(interpreter: Interpreter) -> LocalRun:
        try:
            records = [await interpreter.run(step) for step in range(num_steps)]
            await interpreter.settle()
        except BaseException as error:
            groups.abort()
            post.fail(error)
            raise
        return LocalRun(records, interpreter.observation)

    try:
        runs = await asyncio.gather(*(run(interpreter) for interpreter, _ in ranks.values()))
    finally:
        for _, streams in ranks.values():
            for stream in streams:
                stream.cancel()
                await stream.when_idle().wait_async()
    return dict(zip(ranks, runs, strict=True))


async def _rank(
    model: Model,
    plan: Plan,
    rank: int,
    make_work: MakeWork,
    groups: _LocalGroups,
    post: _Post,
    device: torch.device,
) -> tuple[Interpreter, tuple[ThreadStream, ThreadStream]]:
    program = expand(plan, rank)
    streams = local_stream(f"compute {rank}", device), local_stream(f"comm {rank}", device)
    mine = {
        role: groups.member(name, ranks, rank)
        for role, name, ranks in memberships(model, plan, rank)
    }
    # Its buffers are made where they are used first.
    work = await streams[0].submit(lambda: make_work(program, mine)).wait_async()
    wire = _LocalWire(rank, post)
    return Interpreter(program, work, compute=streams[0], comm=streams[1], wire=wire), streams


class _Post:
    """Events of messages by address, whoever asks first; for the event loop and the streams."""

    def __init__(self) -> None:
        self._events: dict[_Address, Event] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def event(self, address: _Address) -> Event:
        """The one event of a message; sender and receiver each ask once."""
        with self._lock:
            event = self._events.pop(address, None)
            if event is None:
                event = self._events[address] = Event()
            error = self._error
        if error is not None:
            event.fail(error)
        return event

    def fail(self, error: BaseException) -> None:
        """Nothing more arrives."""
        with self._lock:
            self._error = error
            waiting = list(self._events.values())
        for event in waiting:
            event.fail(error)


class _LocalWire:
    """`interface.Wire` of one rank."""

    def __init__(self, rank: int, post: _Post) -> None:
        self._rank = rank
        self._post = post

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""
        arrives = self._post.event((self._rank, peer, tag))
        sent = Event()

        def hand_over(_: Event) -> None:
            if source.error is not None:
                sent.fail(source.error)
                return
            tensor: Tensor = source.wait() if cut is None else cut(source.wait())
            arrives.mark = source.mark
            arrives.set(tensor.reshape(-1).view(torch.uint8))
            sent.mark = source.mark
            sent.set()

        source.when_done(hand_over)
        return sent

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`."""
        return self._post.event((peer, self._rank, tag))


class _Meeting:
    """Where the members of one group exchange tensors, each on a thread of its own."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=_MEET_S)
        self.brought: list[tuple[Sequence[Tensor], Any]] = [((), None)] * degree


class _LocalGroups:
    """Groups by name."""

    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}

    def member(self, name: str, ranks: Sequence[int], rank: int) -> _LocalCommunicator:
        """The end of group `name` that belongs to `rank`."""
        meeting = self._meetings.setdefault(name, _Meeting(len(ranks)))
        return _LocalCommunicator(meeting, ranks, list(ranks).index(rank))

    def abort(self) -> None:
        """End whatever is waited for."""
        for meeting in self._meetings.values():
            meeting.barrier.abort()


class _LocalCommunicator:
    """See `interface.Communicator`; sums are in member order."""

    def __init__(self, meeting: _Meeting, ranks: Sequence[int], index: int) -> None:
        self._meeting = meeting
        self.ranks = tuple(ranks)
        self.index = index
        self.degree = len(self.ranks)

    def all_reduce_(self, tensor: Tensor) -> None:
        """See `Communicator`."""
        if self.degree == 1:
            return
        parts = [parts[0] for parts in self._exchange([tensor.clone()])]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total)

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Communicator`."""
        return torch.stack([parts[0] for parts in self._exchange([part.clone()])])

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Communicator`."""
        mine = [part.clone() for part in parts]
        return [theirs[self.index] for theirs in self._exchange(mine)]

    def _exchange(self, mine: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """What every member brought, for the current stream to read; `mine` does not change."""
        meeting = self._meeting
        meeting.brought[self.index] = mine, _mark_of(mine[0])
        try:
            meeting.barrier.wait()
            brought = list(meeting.brought)
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise CommError(f"a member of ranks {list(self.ranks)} is gone") from None
        for tensors, mark in brought:
            if mark is not None:
                torch.cuda.current_stream(tensors[0].device).wait_event(mark)
                used_here(tensors)
        return [tensors for tensors, _ in brought]


def _mark_of(tensor: Tensor) -> torch.cuda.Event | None:
    """Reached when all that the current stream was given is done; None on CPU."""
    if not tensor.is_cuda:
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(tensor.device))
    return mark
