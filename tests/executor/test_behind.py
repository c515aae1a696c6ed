"""The interpreter on a device that runs behind its host: what it waits for, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from slow_device import SlowLink, SlowPair, SlowQueue, launch
from symbolic import FAR_S, SymbolicWork
from test_interpreter import last_stage

from resihp.executor.boundary import Agreement, Boundary
from resihp.executor.device.edge_wire import EdgeWire
from resihp.executor.device.issuing import IssuingStream
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.iterations import iterate
from resihp.executor.stream import Event
from resihp.ir.model import Op
from resihp.ir.program import ProgramInstr, TensorType, Transfer
from resihp.wire.messages import Finished, Message, Observed, StepDone

PEER = 0
TENSOR = TensorType(1, 1)


class ListWork(SymbolicWork):
    """Payloads are lists, as the slow device's; every computation is a kernel."""

    def forward(self, stage: int, key: tuple[int, int], x: Any) -> None:
        launch(lambda: None)
        self._done("F", stage, key)

    def backward_input(self, stage: int, key: tuple[int, int], dy: Any) -> Any:
        self._done("B", stage, key, before="F")
        return [self.step]

    def num_bytes(self, tensor: TensorType) -> int:
        return 1

    def chunk(self, payload: Any, chunk: int, num_chunks: int) -> Any:
        return payload

    def arrived(self, raw: Any, num_chunks: int) -> Any:
        return raw

    @property
    def version(self) -> int:
        return self.step + 1


class Rank(NamedTuple):
    """Rank 1 and the ends of its pairs at rank 0."""

    interpreter: Interpreter
    work: ListWork
    compute: IssuingStream
    comm: IssuingStream
    feed: SlowLink
    drain: SlowLink

    def deliver(self) -> None:
        with self.feed.queue.active():
            self.feed.send([1])


def instr(op: Op, number: int) -> ProgramInstr:
    is_message = op in (Op.RECV_ACT, Op.SEND_GRAD)
    return ProgramInstr(
        op=op,
        microbatch=number,
        home=0,
        stage=1,
        transfers=(Transfer(PEER, 0, 1),) if is_message else (),
        tensor=TENSOR if is_message else None,
    )


ONE = (
    instr(Op.RECV_ACT, 0),
    instr(Op.F, 0),
    instr(Op.BW, 0),
    instr(Op.SEND_GRAD, 0),
)
RECV, F, BW, SEND, REDUCE, STEP = range(6)


def rank_of(*instrs: ProgramInstr) -> Rank:
    program = last_stage(*instrs)
    compute, comm = (IssuingStream(name, SlowQueue()) for name in ("compute", "comm"))
    into, out = SlowPair(), SlowPair()
    wire = EdgeWire(compute, {PEER: SlowLink(out)}, {PEER: SlowLink(into)})
    work = ListWork(program)
    interpreter = Interpreter(program, work, compute=compute, comm=comm, wire=wire)
    return Rank(interpreter, work, compute, comm, SlowLink(into), SlowLink(out))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_receive_that_was_issued_is_missing_until_the_device_has_it():
    """The host has long issued everything: where a rank is, its device says."""
    rank = rank_of(*ONE)
    await rank.interpreter.run(0)
    where = rank.interpreter.where()
    assert (where.compute, where.compute_waits, where.receives) == (F, True, (RECV,))
    rank.deliver()
    await until(lambda: rank.interpreter.where().compute == -1)
    assert rank.interpreter.where().receives == ()


@pytest.mark.asyncio
async def test_times_of_an_iteration_are_complete_one_later():
    """Device times of everything, messages too; of the last one after `settle`."""
    rank = rank_of(*ONE)
    sent: list[Message] = []
    num_steps = 3
    for _ in range(num_steps):
        rank.deliver()
    arrived, vote = rank.drain, rank.work.vote

    def voted() -> None:
        arrived.next()  # the peer votes too, once it has what this rank sent
        vote()

    rank.work.vote = voted
    await iterate(
        rank.interpreter,
        rank.work,
        num_steps=num_steps,
        generation=1,
        boundary=Boundary(Agreement()),
        send=sent.append,
    )
    steps = [message.observed for message in sent if isinstance(message, StepDone)]
    last = [message for message in sent if isinstance(message, Observed)]
    told = [observed for observed in [*steps, *last] if observed is not None]
    assert [message.step for message in told] == list(range(num_steps))
    assert [type(message) for message in sent[:2]] == [StepDone, StepDone]
    assert isinstance(sent[-1], Finished)
    for message in told:
        starts, ends = (memoryview(raw).cast("q") for raw in (message.starts_ns, message.ends_ns))
        for index in range(len(ONE) + 2):
            assert 0 < starts[index] <= ends[index], index
        assert ends[RECV] <= starts[F] <= ends[F] <= starts[BW] <= starts[SEND]


@pytest.mark.asyncio
async def test_a_sum_without_weight_gradients_waits_for_the_update_before():
    """It writes what that update reads, and nothing else of the iteration orders the two."""
    rank = rank_of()
    updates: list[Event] = []
    submit = rank.compute.submit

    def submitted(*args: Any, **named: Any) -> Event:
        updates.append(submit(*args, **named))
        return updates[-1]

    rank.compute.submit = submitted  # type: ignore[method-assign]
    await rank.interpreter.run(0)
    await rank.interpreter.run(1)
    (first, _) = updates
    queue = rank.comm.queue
    assert isinstance(queue, SlowQueue)
    assert first.mark in queue.waited
