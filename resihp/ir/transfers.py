"""The transfers of a plan that have both ends, and how they wait for each other.

One class per model of `resihp.ir.transport`; all answer the same four questions: what happens
when a send or a receive is posted, and what a transfer that is not done yet waits for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from resihp.ir.lanes import BY_TRANSFER, EDGES, Lane, Task
from resihp.ir.model import GroupName
from resihp.ir.transport import Transport

__all__ = [
    "At",
    "Queues",
    "Transfer",
    "Wait",
    "handovers_of",
    "queues_of",
    "sends_of",
    "transfers_of",
]


class At(NamedTuple):
    """An instruction by its lane and its index there."""

    name: GroupName
    position: int


class Wait(NamedTuple):
    """What is waited for, and what stands before it in its queue (None: it is not posted)."""

    awaited: At
    behind: At | None


class Transfer:
    """One tensor from lane to lane. Compared by identity."""

    __slots__ = ("done", "num_bytes", "receiver", "recv", "send", "sender", "use")

    def __init__(
        self, sender: GroupName, send: int, receiver: GroupName, recv: int, use: int | None
    ) -> None:
        self.sender = sender
        self.send = send
        """Index of the send."""
        self.receiver = receiver
        self.recv = recv
        """Index of the receive."""
        self.use = use
        """Index of the instruction of the receiver that waits for the tensor."""
        self.num_bytes = 0
        """What one rank pair carries of it."""
        self.done: float | None = None
        """When the tensor is there."""

    def end(self, name: GroupName) -> At:
        """The instruction at one end."""
        return At(name, self.send if self.sender == name else self.recv)

    def far_end(self, name: GroupName) -> At:
        """The instruction at the other end."""
        return self.end(self.receiver if self.sender == name else self.sender)


def sends_of(lanes: Mapping[GroupName, Lane], sender: Lane) -> Iterator[Transfer]:
    """Transfers from one lane that have both ends, in the order of their sends.

    Both ends must name each other: what is received from somebody else is no end of it.
    """
    for (op, task), send in sender.first.items():
        edge = BY_TRANSFER.get(op)
        if edge is None or op is not edge.send:
            continue
        far_end = sender.far_end(send)
        receiver = None if far_end is None else lanes.get(far_end[0])
        if far_end is None or receiver is None or receiver is sender:
            continue
        recv = receiver.first.get((edge.recv, far_end[1]))
        if recv is not None and receiver.far_end(recv) == (sender.name, task):
            use = receiver.use_of(edge, far_end[1])
            yield Transfer(sender.name, send, receiver.name, recv, use)


def transfers_of(
    lanes: Mapping[GroupName, Lane], boundary_bytes: Mapping[GroupName, int] | None = None
) -> Iterator[Transfer]:
    """All transfers with a send and a receive, per channel in the order of the sends.

    `boundary_bytes` is the size of a whole tensor that a group sends; without it sizes are 0.
    """
    for name, sender in lanes.items():
        for transfer in sends_of(lanes, sender):
            if boundary_bytes is not None:
                task, edge = sender.tasks[transfer.send], BY_TRANSFER[sender.body[transfer.send].op]
                assert task is not None
                cut = (edge.scatter, task) in sender.first
                degrees = sender.group.tp, lanes[transfer.receiver].group.tp
                transfer.num_bytes = boundary_bytes[name] // (max(degrees) if cut else 1)
            yield transfer


def handovers_of(lanes: Mapping[GroupName, Lane]) -> Iterator[Transfer]:
    """What the lanes of a schedule, which names no transfer, use of each other's results.

    The ends are the instruction that makes a tensor and the one that uses it.
    """
    for edge in EDGES:
        makers: dict[Task, At] = {}
        for name, lane in lanes.items():
            for (op, task), index in lane.first.items():
                if op in edge.produce:
                    makers.setdefault(task, At(name, index))
        for name, lane in lanes.items():
            for (op, task), index in lane.first.items():
                if op in edge.consume:
                    maker = makers.get(task.at(task.stage - edge.stage_step))
                    if maker is not None and maker.name != name:
                        yield Transfer(maker.name, maker.position, name, index, index)


class Queues(Protocol):
    """How posted transfers wait for each other."""

    def send(self, transfer: Transfer, time: float) -> float | None:
        """The sender reaches its send; when it goes on. None: it waits, until it is woken."""
        ...

    def receive(self, transfer: Transfer, time: float) -> None:
        """The receiver reaches its receive."""
        ...

    def waits(self, transfer: Transfer, name: GroupName) -> Iterator[Wait]:
        """What the end at `name`, which has posted the transfer, waits for."""
        ...


_Wake = Callable[[GroupName], None]


def queues_of(transport: Transport, transfers: list[Transfer], wake: _Wake) -> Queues:
    """The queues of a transport. `wake` is called with each lane that may go on."""
    if transport.kind == "edge":
        return _Edge(wake)
    if transport.kind == "eager":
        return _Eager(transport.eager_bytes, transfers, wake)
    return _Shared(transfers, wake, per_pair=transport.kind == "pair")


class _Edge:
    def __init__(self, wake: _Wake) -> None:
        self.wake = wake

    def send(self, transfer: Transfer, time: float) -> float | None:
        transfer.done = time
        self.wake(transfer.receiver)
        return time

    def receive(self, transfer: Transfer, time: float) -> None:
        """A receive is nothing that anybody waits for."""

    def waits(self, transfer: Transfer, name: GroupName) -> Iterator[Wait]:
        yield Wait(transfer.far_end(name), None)


class _List:
    """What one rank has posted to one queue and has not got rid of."""

    __slots__ = ("free", "name", "posted")

    def __init__(self, name: GroupName) -> None:
        self.name = name
        self.posted: deque[tuple[Transfer, float]] = deque()
        self.free = 0.0
        """When the transfer before the head ended."""


class _Shared:
    """A transfer ends at the head of both its lists."""

    def __init__(self, transfers: list[Transfer], wake: _Wake, *, per_pair: bool) -> None:
        self.wake = wake
        lists: dict[tuple[GroupName, GroupName | None], _List] = {}
        self.lists: dict[Transfer, tuple[_List, _List]] = {}
        """The sender's and the receiver's."""
        for transfer in transfers:
            sender, receiver = transfer.sender, transfer.receiver
            self.lists[transfer] = (
                lists.setdefault((sender, receiver if per_pair else None), _List(sender)),
                lists.setdefault((receiver, sender if per_pair else None), _List(receiver)),
            )

    def send(self, transfer: Transfer, time: float) -> float | None:
        self._post(self.lists[transfer][0], transfer, time)
        return time

    def receive(self, transfer: Transfer, time: float) -> None:
        self._post(self.lists[transfer][1], transfer, time)

    def _post(self, mine: _List, transfer: Transfer, time: float) -> None:
        mine.posted.append((transfer, time))
        unsettled = [mine]
        while unsettled:
            mine = unsettled.pop()
            if not mine.posted:
                continue
            transfer, here = mine.posted[0]
            theirs = self._far_list(mine, transfer)
            if theirs.posted and theirs.posted[0][0] is transfer:
                there = theirs.posted[0][1]
                done = max(here, there, mine.free, theirs.free)
                for ended in (mine, theirs):
                    ended.posted.popleft()
                    ended.free = done
                transfer.done = done
                self.wake(transfer.receiver)
                unsettled += (mine, theirs)

    def _far_list(self, mine: _List, transfer: Transfer) -> _List:
        senders, receivers = self.lists[transfer]
        return receivers if mine is senders else senders

    def waits(self, transfer: Transfer, name: GroupName) -> Iterator[Wait]:
        mine = self.lists[transfer][0 if name == transfer.sender else 1]
        theirs = self._far_list(mine, transfer)
        head = mine.posted[0][0]
        if head is not transfer:
            yield Wait(transfer.end(name), head.end(name))
        there = transfer.far_end(name)
        if all(posted is not transfer for posted, _ in theirs.posted):
            yield Wait(there, None)
        elif (head := theirs.posted[0][0]) is not transfer:
            yield Wait(there, head.end(theirs.name))


class _Channel:
    """The messages of one directed rank pair under `eager`, in the order of their sends."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.received: dict[int, float] = {}
        """When the receive of each place was posted."""
        self.taken_at: list[float] = []
        """When each message was taken; those beyond its length are not."""

    def num_to_take(self, capacity: int) -> Iterator[int]:
        """Per message: how many, from the first on, must be taken before its send is over."""
        oldest, in_flight = 0, 0
        for transfer in self.transfers:
            in_flight += transfer.num_bytes
            while in_flight > capacity:
                in_flight -= self.transfers[oldest].num_bytes
                oldest += 1
            yield oldest

    def receive(self, place: int, time: float) -> None:
        self.received[place] = time
        while len(self.taken_at) in self.received:
            before = self.taken_at[-1] if self.taken_at else 0.0
            self.taken_at.append(max(before, self.received[len(self.taken_at)]))


class _Eager:
    def __init__(self, capacity: int, transfers: list[Transfer], wake: _Wake) -> None:
        self.wake = wake
        self.channels: dict[tuple[GroupName, GroupName], _Channel] = defaultdict(_Channel)
        self.places: dict[Transfer, int] = {}
        self.num_to_take: dict[Transfer, int] = {}
        for transfer in transfers:
            channel = self._channel(transfer)
            self.places[transfer] = len(channel.transfers)
            channel.transfers.append(transfer)
        for channel in self.channels.values():
            self.num_to_take.update(
                zip(channel.transfers, channel.num_to_take(capacity), strict=True)
            )

    def _channel(self, transfer: Transfer) -> _Channel:
        return self.channels[transfer.sender, transfer.receiver]

    def send(self, transfer: Transfer, time: float) -> float | None:
        if transfer.done is None:
            transfer.done = time
            self.wake(transfer.receiver)
        taken_at, needed = self._channel(transfer).taken_at, self.num_to_take[transfer]
        if needed > len(taken_at):
            return None
        return max(time, taken_at[needed - 1]) if needed else time

    def receive(self, transfer: Transfer, time: float) -> None:
        self._channel(transfer).receive(self.places[transfer], time)
        self.wake(transfer.sender)

    def waits(self, transfer: Transfer, name: GroupName) -> Iterator[Wait]:
        channel = self._channel(transfer)
        if name == transfer.sender:
            transfer = channel.transfers[len(channel.taken_at)]
        yield Wait(transfer.far_end(name), None)
