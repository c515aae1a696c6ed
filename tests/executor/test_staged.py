"""Device tensors through host memory: over real sockets, and through groups of threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from cases import ThreadGroup
from slow_device import SlowQueue
from test_transport import transports

from resihp.errors import GenerationClosed
from resihp.executor.device.interface import STATE, Tag
from resihp.executor.device.issuing import IssuingStream
from resihp.executor.device.staged import StagedCommunicator, StagedWire
from resihp.executor.stream import Event
from resihp.executor.transport import Transport

CPU = torch.device("cpu")


def staged(transport: Transport) -> StagedWire:
    wire = StagedWire(transport, lambda name: IssuingStream(name, SlowQueue()), CPU)
    wire.begin()
    return wire


def tag(number: int, kind: int = 5) -> Tag:
    return Tag(kind=kind, step=0, stage=0, home=0, microbatch=number, chunk=0)


def test_a_tensor_arrives_as_bytes_on_the_device():
    """Cut, copied to the host, sent, copied to the other device."""

    async def run() -> None:
        async with transports(2) as (first, second):
            sender, receiver = staged(first), staged(second)
            source = Event()
            sender.send(1, tag(0), source, lambda tensor: tensor[2:])
            arrived = receiver.receive(0, tag(0), 8)
            source.set(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            raw = await arrived.wait_async()
            assert isinstance(raw, torch.Tensor)
            assert raw.view(torch.float32).tolist() == [3.0, 4.0]

    asyncio.run(run())


def test_messages_are_copied_as_they_arrive():
    """One that was asked for first and comes last holds up no other."""

    async def run() -> None:
        async with transports(3) as (first, second, third):
            wires = [staged(transport) for transport in (first, second, third)]
            late = wires[2].receive(0, tag(0), 4)
            early = wires[2].receive(1, tag(0), 4)
            sources = Event(), Event()
            for rank, source in enumerate(sources):
                wires[rank].send(2, tag(0), source)
            sources[1].set(torch.tensor([5.0]))
            raw = await early.wait_async()
            assert raw.view(torch.float32).tolist() == [5.0]
            assert not late.done
            sources[0].set(torch.tensor([6.0]))
            raw = await late.wait_async()
            assert raw.view(torch.float32).tolist() == [6.0]

    asyncio.run(run())


def test_state_stays_in_host_memory():
    """Whoever unpacks it copies piece by piece."""

    async def run() -> None:
        async with transports(2) as (first, second):
            source = Event()
            source.set(torch.tensor([7.0]))
            staged(first).send(1, tag(0, STATE), source)
            raw = await staged(second).receive(0, tag(0, STATE), 4).wait_async()
            assert torch.frombuffer(raw, dtype=torch.float32).tolist() == [7.0]

    asyncio.run(run())


def test_the_end_of_a_generation_ends_what_waits():
    """A receive whose message never comes, and a send whose tensor never does."""

    async def run() -> None:
        async with transports(2) as (first, second):
            sender, receiver = staged(first), staged(second)
            never = Event()
            sent = sender.send(1, tag(0), never)
            arrived = receiver.receive(0, tag(0), 4)
            second.end()
            receiver.end()
            with pytest.raises(GenerationClosed):
                await arrived.wait_async()
            never.fail(GenerationClosed("the generation is over"))
            with pytest.raises(GenerationClosed):
                await sent.wait_async()

    asyncio.run(run())


class ThreadMember:
    """A host group of one member of a `ThreadGroup`, as gloo's would be."""

    def __init__(self, tp) -> None:
        self.ranks, self.index, self.degree = tuple(range(tp.degree)), tp.index, tp.degree
        self._tp = tp

    def all_reduce_(self, tensor):
        assert tensor.device == CPU
        self._tp.all_reduce_(tensor)

    def all_gather(self, part):
        out = part.new_zeros((self.degree, *part.shape))
        out[self.index] = part
        self.all_reduce_(out)
        return out

    def all_to_all(self, parts, sizes):
        table = self.all_gather(torch.stack(list(parts)))
        return list(table[:, self.index])


def test_groups_copy_there_and_back():
    """Sums, parts in member order and pieces for everybody, on the device that they came from."""
    lock = threading.Lock()
    found = {}

    def work(tp):
        group = StagedCommunicator(ThreadMember(tp))
        total = torch.tensor([1.0 + tp.index, 10.0])
        group.all_reduce_(total)
        parts = group.all_gather(torch.tensor([float(tp.index)]))
        pieces = group.all_to_all([torch.tensor([10.0 * tp.index + to]) for to in (0, 1)], [1, 1])
        with lock:
            found[tp.index] = total.tolist(), parts.tolist(), [p.tolist() for p in pieces]

    ThreadGroup(2).run(work)
    assert found[0] == ([3.0, 20.0], [[0.0], [1.0]], [[0.0], [10.0]])
    assert found[1] == ([3.0, 20.0], [[0.0], [1.0]], [[1.0], [11.0]])
