"""Runs one rank's program: each instruction is queued on the stream that owns its resource.

The coroutine never waits for a chunk; it queues the whole iteration ahead and awaits its end.
Data dependencies are events. F, B, W and the update belong to the compute stream; gathers, the
reduction and the vote to the communication stream; sends are posted by the event loop when
their tensor is there, receives are posted when the program reaches them.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.device.interface import Tag
from resihp.executor.gradients import GradientTree
from resihp.executor.groups import Communicator
from resihp.executor.model import Key, Model, Stage
from resihp.executor.reduce import Reducer
from resihp.executor.sampler import GlobalBatches
from resihp.executor.state import TrainState
from resihp.executor.stream import Event, ThreadStream
from resihp.executor.transport import Transport
from resihp.executor.vote import Contribution, Voter, squared_norms
from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr, Transfer
from resihp.wire.messages import StepRecord

__all__ = ["Interpreter"]


class Interpreter:
    """Everything that one generation's iterations need; `run` executes one."""

    def __init__(
        self,
        program: Program,
        model: Model,
        stage: Stage,
        state: TrainState,
        batches: GlobalBatches,
        shape_TD: tuple[int, int],
        *,
        compute: ThreadStream,
        comm: ThreadStream,
        transport: Transport,
        gather_group: Communicator,
        reducer: Reducer,
        world: Communicator,
        voter: Voter,
        counts_norms: bool,
        before: Callable[[int, int], Callable[[], None] | None],
    ) -> None:
        """`shape_TD` is that of an activation between stages.

        `before(step, index)` may name work to do right before an instruction (an injection).
        """
        self._program = program
        self._model = model
        self._stage = stage
        self._state = state
        self._batches = batches
        self._shape_TD = shape_TD
        self._compute = compute
        self._comm = comm
        self._transport = transport
        self._gather_group = gather_group
        self._reducer = reducer
        self._world = world
        self._voter = voter
        self._counts_norms = counts_norms
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[tuple[Op, Key], Event] = {}
        self._inputs: dict[tuple[Op, Key], Event] = {}
        self._arrivals: dict[tuple[Op, Key], list[Event]] = {}
        self._tree = GradientTree(batches.num_replicas, batches.num_microbatches)
        self._handlers: dict[Op, Callable[[ProgramInstr], None]] = {
            Op.F: self._forward,
            Op.B: self._backward_input,
            Op.W: self._backward_weight,
            Op.BW: self._backward,
            Op.SCATTER_ACT: self._scatter,
            Op.SCATTER_GRAD: self._scatter,
            Op.SEND_ACT: self._send,
            Op.SEND_GRAD: self._send,
            Op.RECV_ACT: self._receive,
            Op.RECV_GRAD: self._receive,
            Op.GATHER_ACT: self._gather,
            Op.GATHER_GRAD: self._gather,
            Op.REDUCE_GRADS: self._reduce,
            Op.GATHER_PARAMS: self._whole_already,
            Op.FREE_PARAMS: self._whole_already,
            Op.STEP: self._step,
        }

    async def run(self, step: int) -> StepRecord:
        """Execute one iteration and commit it; its record.

        Raises what broke it first: `GenerationClosed` when cancelled, `CommError` or `PeerLost`
        when a peer is gone, anything else is a bug.
        """
        self._begin(step)
        for index, instr in enumerate(self._program.instrs):
            self._index = index
            fault = self._before(step, index)
            if fault is not None:
                stream, waits = self._stream_of(instr)
                stream.submit(fault, waits=waits, label=index)
            self._handlers[instr.op](instr)
        await self._last.wait_async()
        assert self._state.record is not None
        return self._state.record

    def discard(self) -> None:
        """Drop everything of the iteration that was begun; both streams are idle."""
        self._stage.discard_all()
        self._tree.discard_all()
        self._outputs.clear()
        self._inputs.clear()
        self._arrivals.clear()

    def _begin(self, step: int) -> None:
        self._step_number = step
        self._start_s = time.monotonic()
        self._loss_scale = 1.0 / self._batches.num_targets(step)
        self._last = Event()
        self._last.set()
        self._index = 0
        self._samples: dict[int, int] = {}
        self.discard()

    def _stream_of(self, instr: ProgramInstr) -> tuple[ThreadStream, list[Event]]:
        """Where an injected fault runs, so that it hits right before `instr`."""
        if instr.op in (Op.REDUCE_GRADS, Op.STEP):
            return self._comm, [self._last]
        return self._compute, []

    def _queue(self, work: Callable[[], Any], *, waits: list[Event]) -> Event:
        self._last = self._compute.submit(work, waits=waits, label=self._index)
        return self._last

    # --- compute

    def _forward(self, instr: ProgramInstr) -> None:
        key = _key(instr)
        arrived = self._input(Op.RECV_ACT, key)

        def work() -> Tensor | None:
            batch = self._batches.micro_batch(self._step_number, *key)
            if self._stage.has_head and self._program.tp_index == 0:
                self._samples[self._number(key)] = batch.sample_id
            x_TD = None if self._stage.has_embedding else arrived[0].wait()
            return self._stage.forward(key, batch, x_TD, loss_scale=self._loss_scale)

        self._outputs[Op.SEND_ACT, key] = self._queue(work, waits=arrived)

    def _backward_input(self, instr: ProgramInstr) -> None:
        key = _key(instr)
        arrived = self._input(Op.RECV_GRAD, key)

        def work() -> Tensor | None:
            dy_TD = None if self._stage.has_head else arrived[0].wait()
            return self._stage.backward_input(key, dy_TD)

        self._outputs[Op.SEND_GRAD, key] = self._queue(work, waits=arrived)

    def _backward_weight(self, instr: ProgramInstr) -> None:
        key = _key(instr)

        def work() -> None:
            self._tree.add(*key, self._stage.backward_weight(key))

        self._queue(work, waits=[])

    def _backward(self, instr: ProgramInstr) -> None:
        """B and W fused. The gradient for the previous stage is sent before W has run."""
        self._backward_input(instr)
        self._backward_weight(instr)

    def _whole_already(self, instr: ProgramInstr) -> None:
        """Data parallelism shards no parameters here: nothing to gather or to free."""

    # --- point to point

    def _scatter(self, instr: ProgramInstr) -> None:
        """Chunks are views: nothing to do before the send, which names those we owe."""

    def _send(self, instr: ProgramInstr) -> None:
        key = _key(instr)

        source = self._outputs.pop((instr.op, key))
        for transfer in instr.transfers:

            def cut(tensor: Tensor, transfer: Transfer = transfer) -> Tensor:
                return tensor.chunk(transfer.num_chunks)[transfer.chunk]

            tag = self._tag(instr.op, key, transfer.chunk)
            self._transport.send(transfer.peer, tag, source, cut)

    def _receive(self, instr: ProgramInstr) -> None:
        key = _key(instr)
        sent_as = Op.SEND_ACT if instr.op is Op.RECV_ACT else Op.SEND_GRAD
        num_bytes = 4 * self._shape_TD[0] * self._shape_TD[1] // instr.num_chunks
        events = [
            self._transport.receive(
                transfer.peer, self._tag(sent_as, key, transfer.chunk), num_bytes
            )
            for transfer in instr.transfers
        ]
        if instr.num_chunks > 1:
            self._arrivals[instr.op, key] = events
        else:
            self._inputs[instr.op, key] = self._whole(events[0], key, instr)

    def _whole(self, event: Event, key: Key, instr: ProgramInstr) -> Event:
        """The whole tensor from one payload, as soon as it is here."""
        whole = Event()

        def arrived(event: Event) -> None:
            if event.error is not None:
                whole.fail(event.error)
                return
            try:
                whole.set(self._rows(event.wait(), 1, key, instr.op))
            except CommError as error:
                whole.fail(error)

        event.when_done(arrived)
        return whole

    def _gather(self, instr: ProgramInstr) -> None:
        key = _key(instr)
        op = Op.RECV_ACT if instr.op is Op.GATHER_ACT else Op.RECV_GRAD
        events = self._arrivals.pop((op, key), None)
        if events is None:
            return  # one chunk is the whole tensor, which the receive delivers

        def work() -> Tensor:
            rows = [self._rows(event.wait(), instr.num_chunks, key, op) for event in events]
            whole = self._gather_group.all_gather(torch.cat(rows))
            return whole.reshape(-1, whole.shape[-1])

        self._inputs[op, key] = self._comm.submit(work, waits=events, label=self._index)

    def _tag(self, op: Op, key: Key, chunk: int) -> Tag:
        home, microbatch = key
        return Tag(int(op), self._step_number, 0, home, microbatch, chunk)

    def _rows(self, payload: memoryview, num_chunks: int, key: Key, op: Op) -> Tensor:
        """The rows of one chunk; CommError where the size is not what the plan says."""
        shape = (self._shape_TD[0] // num_chunks, self._shape_TD[1])
        if len(payload) != 4 * shape[0] * shape[1]:
            raise CommError(f"{op.mnemonic} {key}: {len(payload)} bytes do not make {shape}")
        return torch.frombuffer(payload, dtype=torch.float32).view(shape)

    def _input(self, op: Op, key: Key) -> list[Event]:
        event = self._inputs.pop((op, key), None)
        return [] if event is None else [event]

    # --- the end of the iteration

    def _reduce(self, instr: ProgramInstr) -> None:
        def work() -> None:
            reduced = self._reducer.reduce(self._tree, self._stage.parameters)
            self._state.reduce_complete(reduced)

        self._last = self._comm.submit(work, waits=[self._last], label=self._index)

    def _step(self, instr: ProgramInstr) -> None:
        vote = self._comm.submit(self._vote, waits=[self._last], label=self._index)
        self._queue(self._state.apply, waits=[vote])

    def _vote(self) -> None:
        reduced = self._state.reduced
        assert reduced is not None
        contribution = Contribution(
            finite=all(bool(tensor.isfinite().all()) for tensor in reduced.values()),
            losses={n: self._stage.loss_of(self._key_of(n)) for n in self._samples},
            samples=self._samples,
            squared_norms=squared_norms(
                self._model, reduced, self._program.tp_index, counts=self._counts_norms
            ),
        )
        outcome = self._voter.count(self._world.all_gather(self._voter.pack(contribution)))
        self._state.vote_complete(
            StepRecord(
                step=self._step_number,
                loss=outcome.loss_sum * self._loss_scale,
                grad_norm=outcome.grad_norm,
                learning_rate=self._state.learning_rate(self._step_number),
                skipped=not outcome.finite,
                num_tokens=len(outcome.samples) * self._shape_TD[0],
                samples=outcome.samples,
                duration_s=time.monotonic() - self._start_s,
            )
        )

    def _number(self, key: Key) -> int:
        """Global number of a micro-batch."""
        return key[0] * self._batches.num_microbatches + key[1]

    def _key_of(self, number: int) -> Key:
        return divmod(number, self._batches.num_microbatches)


def _key(instr: ProgramInstr) -> Key:
    assert instr.home is not None
    assert instr.microbatch is not None
    return instr.home, instr.microbatch
