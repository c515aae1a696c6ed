"""Runs one rank's program: each instruction is queued on the stream that owns its resource.

The coroutine never waits for a chunk; it queues the whole iteration ahead and awaits its end.
Data dependencies are events. F, B, W and the update belong to the compute stream; gathers, the
reduction and the vote to the communication stream; sends and receives to the wire. Each resource
works in the order of the program.

Whatever breaks first, on any resource, ends the iteration: both streams drop what is queued, and
`run` raises that error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from resihp.executor.device.interface import Tag, Wire
from resihp.executor.interpreter.flow import flow_of
from resihp.executor.interpreter.observe import Observation
from resihp.executor.model import Key
from resihp.executor.stream import Event, Stream
from resihp.executor.threads import in_thread
from resihp.executor.work import Payload, Work
from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr
from resihp.wire.messages import StepRecord

__all__ = ["Interpreter", "Where"]

_Issue = Callable[[], None]
_YIELD_EVERY = 256
"""Instructions queued before the loop gets to do something else: about a millisecond."""


class Where(NamedTuple):
    """What a rank does now, by index into its program (-1: nothing)."""

    step: int
    compute: int
    comm: int
    receives: tuple[int, ...]
    """Receives that one of the two waits for and that are not here; empty: nothing is missing."""
    compute_waits: bool
    """Its inputs are not there."""
    comm_waits: bool


class Interpreter:
    """Everything that one generation's iterations need; `run` executes one."""

    def __init__(
        self,
        program: Program,
        work: Work,
        *,
        compute: Stream,
        comm: Stream,
        wire: Wire,
        before: Callable[[int, int], Callable[[], None] | None] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`program` is verified, `wire` is connected to all that it sends to.

        `clock_ns` is the clock that events of the streams and the wire tell.
        `before(step, index)` may name work to do right before an instruction (an injection).
        """
        self.program = program
        self._work = work
        self._compute = compute
        self._comm = comm
        self._wire = wire
        self._before = before
        self._clock_ns = clock_ns
        self._flow = flow_of(program)
        self._step = -1
        self._events: list[Any] = [None] * len(program.instrs)
        """Per instruction what delivers its tensor, from its queueing to its last user's: an
        event, or for a receive in chunks the events of all chunks."""
        self._last_compute: Event | None = None
        self._last_weight: dict[int, Event] = {}
        """The newest weight gradient of each stage."""
        self._applied: Event | None = None
        """The update of the iteration before: it reads what `reduce` writes."""
        self._ending = Event()
        size = len(program.instrs)
        self._observed, self._ended, self._observing = (Observation(size) for _ in range(3))
        self._issue = [self._prepared(index) for index in range(size)]

    @property
    def observation(self) -> Observation:
        """Times of the last iteration of which all are known; overwritten by the next but one.

        That is the last one, or where the device runs behind the host the one before it, until
        `settle`; its step is -1 where there is none.
        """
        return self._observed

    async def settle(self) -> None:
        """Wait until the device has done all iterations: `observation` is of the last one then."""
        if self._ended.step <= self._observed.step:
            return
        for stream in (self._compute, self._comm):
            await stream.when_idle().wait_async()
            await stream.submit(_nothing).wait_async()  # tells what ended before it
        await in_thread(self._ended.wait)  # messages have queues of their own
        self._ended.settle()
        self._observed, self._ended = self._ended, self._observed
        self._ended.clear(-1)

    def _turn_observations(self, *, is_behind: bool) -> None:
        """An iteration is over; `is_behind`: the device may not have done all of it.

        But it has done the one before, which the vote of this one came after.
        """
        if not is_behind:
            self._observed, self._observing = self._observing, self._observed
            return
        self._ended.settle()
        self._observed, self._ended, self._observing = (
            self._ended,
            self._observing,
            self._observed,
        )

    def where(self) -> Where:
        """What the rank does at this moment."""
        compute, comm = self._compute, self._comm
        waiting = [stream.position for stream in (compute, comm) if stream.is_waiting]
        missing = {each for index in waiting if index >= 0 for each in self._missing(index)}
        return Where(
            self._step,
            compute.position,
            comm.position,
            tuple(sorted(missing)),
            compute.is_waiting,
            comm.is_waiting,
        )

    def _missing(self, index: int) -> Iterator[int]:
        """The receives that instruction `index` waits for, with the other one of its pair."""
        for source in (self._flow.source[index], self._partner_source(index)):
            at = source
            while at is not None and not self.program.instrs[at].op.is_receive:
                at = self._flow.source[at]
            if at is not None and not self._observing.is_over(at):
                yield at

    async def run(self, step: int) -> StepRecord:
        """Execute one iteration and commit it; its record.

        Raises what broke it first: `GenerationClosed` when cancelled, `CommError` or `PeerLost`
        when a peer is gone, anything else is a bug.
        """
        self._begin(step)
        before, ends, events = self._before, self._flow.ends, self._events
        for index, issue in enumerate(self._issue):
            if before is not None:
                self._inject(before(step, index), index)
            issue()
            for made in ends[index]:
                events[made] = None
            if index % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
        assert self._last_compute is not None, "a program without a step"
        self._last_compute.when_done(self._end)
        await self._ending.wait_async()
        self._turn_observations(is_behind=self._last_compute.mark is not None)
        return self._work.record()

    def discard(self) -> None:
        """Drop everything of the iteration that was begun; both streams are idle.

        They keep no reference to this interpreter, and nothing that ends late reaches them.
        """
        self._forget()
        self._applied = None
        self._work.discard()
        for stream in (self._compute, self._comm):
            stream.on_error = stream.observation = None

    def _begin(self, step: int) -> None:
        self._forget()
        self._step = step
        self._observing.clear(step)
        ending = self._ending
        for stream in (self._compute, self._comm):
            stream.observation = self._observing
            stream.on_error = lambda error: self._break(error, ending)
        self._work.begin(step)

    def _forget(self) -> None:
        self._events[:] = [None] * len(self._events)
        self._last_weight.clear()
        self._last_compute = None
        self._ending = Event()

    def _end(self, last: Event) -> None:
        if last.error is None:
            self._ending.set()
        else:
            self._break(last.error, self._ending)

    def _break(self, error: BaseException, ending: Event) -> None:
        """End the iteration that `ending` ends with `error`; from any thread."""
        if ending is self._ending:
            self._compute.cancel(error)
            self._comm.cancel(error)
            ending.fail(error)

    def _inject(self, fault: Callable[[], None] | None, index: int) -> None:
        """Queue a fault so that it hits right before instruction `index`."""
        if fault is None:
            return
        stream = self._compute
        waits: Sequence[Event] = ()
        if self.program.instrs[index].op in (Op.REDUCE_GRADS, Op.STEP):
            stream, waits = self._comm, self._after_compute()
        stream.submit(fault, waits=waits, label=index)

    def _after_compute(self) -> Sequence[Event]:
        return () if self._last_compute is None else (self._last_compute,)

    # --- what queues one instruction, made once per generation

    def _prepared(self, index: int) -> _Issue:
        instr = self.program.instrs[index]
        match instr.op:
            case Op.F:
                return self._forward(index, instr)
            case Op.B:
                return self._backward_input(index, instr)
            case Op.W:
                return self._backward_weight(index, instr)
            case Op.BW:
                return _both(
                    self._backward_input(index, instr), self._backward_weight(index, instr)
                )
            case Op.SEND_ACT | Op.SEND_GRAD:
                return self._send(index, instr)
            case Op.RECV_ACT | Op.RECV_GRAD:
                return self._receive(index, instr)
            case Op.GATHER_ACT | Op.GATHER_GRAD if instr.num_chunks > 1:
                return self._gather(index, instr)
            case Op.REDUCE_GRADS:
                return self._reduce(index, instr)
            case Op.STEP:
                return partial(self._step_at, index)
            case _:
                # Chunks are views, cut when they are sent; one chunk is the whole tensor; data
                # parallelism shards no parameters, so there is nothing to gather or to free.
                return _nothing

    def _forward(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, key = _place(instr)
        return self._computed(index, partial(self._work.forward, stage, key))

    def _backward_input(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, key = _place(instr)
        return self._computed(index, partial(self._work.backward_input, stage, key))

    def _computed(self, index: int, compute: Callable[[Payload | None], Payload | None]) -> _Issue:
        """F or B: `compute` on the tensor of its source, or on None where it has none."""
        source, partner = self._flow.source[index], self._partner_source(index)
        events, submit = self._events, self._compute.submit
        if source is None:
            alone = partial(compute, None)

            def issue_alone() -> None:
                waits = () if partner is None else (events[partner],)
                self._last_compute = events[index] = submit(alone, waits=waits, label=index)

            return issue_alone
        load = self._loader(source)

        def issue() -> None:
            made = events[source]
            waits = (made,) if partner is None else (made, events[partner])
            item = partial(_computed_on, compute, load, made)
            self._last_compute = events[index] = submit(item, waits=waits, label=index)

        return issue

    def _partner_source(self, index: int) -> int | None:
        """What the second of a pair waits for, where `index` is the first: both start together."""
        if not self.program.instrs[index].paired:
            return None
        return self._flow.source[index + 1]

    def _loader(self, source: int) -> Callable[[Event], Payload]:
        """How the tensor of an event of instruction `source` is read on a stream."""
        if self.program.instrs[source].op.is_receive:
            arrived = self._work.arrived
            return lambda made: arrived(made.wait(), 1)
        return Event.wait

    def _backward_weight(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, key = _place(instr)
        item = partial(self._work.backward_weight, stage, key)
        submit, newest = self._compute.submit, self._last_weight
        partner, events = self._partner_source(index), self._events

        def issue() -> None:
            waits = () if partner is None else (events[partner],)
            self._last_compute = newest[stage] = submit(item, waits=waits, label=index)

        return issue

    # --- point to point

    def _send(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, key = _place(instr)
        source = self._flow.source[index]
        assert source is not None
        cuts = [
            (t.peer, t.chunk, partial(self._work.chunk, chunk=t.chunk, num_chunks=t.num_chunks))
            for t in instr.transfers
        ]
        kind, send, events = int(instr.op), self._wire.send, self._events

        def issue() -> None:
            made, observation, ending = events[source], self._observing, self._ending

            def sent(event: Event) -> None:
                if event.error is not None:
                    self._break(event.error, ending)
                    return
                observation.began_with(index, made)
                observation.ended_with(index, (event,))

            for peer, chunk, cut in cuts:
                tag = Tag(kind, self._step, stage, *key, chunk)
                send(peer, tag, made, cut).when_done(sent)

        return issue

    def _receive(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, key = _place(instr)
        assert instr.tensor is not None
        num_bytes = self._work.num_bytes(instr.tensor)
        is_act = instr.op is Op.RECV_ACT
        kind = int(Op.SEND_ACT if is_act else Op.SEND_GRAD)
        sender = stage - 1 if is_act else stage + 1
        chunks = [(t.peer, t.chunk) for t in instr.transfers]
        is_whole = instr.num_chunks == 1
        receive, events = self._wire.receive, self._events

        def issue() -> None:
            observation, ending = self._observing, self._ending
            posted_ns = self._clock_ns()
            observation.began(index, posted_ns)
            made: list[Event] = []

            def arrived(event: Event) -> None:
                if event.error is not None:
                    self._break(event.error, ending)
                elif len(made) == len(chunks) and all(each.done for each in made):
                    observation.ended_with(index, made, posted_ns)

            for peer, chunk in chunks:
                tag = Tag(kind, self._step, sender, *key, chunk)
                event = receive(peer, tag, num_bytes)
                made.append(event)
                event.when_done(arrived)
            events[index] = made[0] if is_whole else made

        return issue

    def _gather(self, index: int, instr: ProgramInstr) -> _Issue:
        stage, _ = _place(instr)
        source, num_chunks = self._flow.source[index], instr.num_chunks
        assert source is not None
        gather, arrived = self._work.gather, self._work.arrived
        submit, events = self._comm.submit, self._events

        def issue() -> None:
            made: list[Event] = events[source]

            def item() -> Payload:
                return gather(stage, [arrived(event.wait(), num_chunks) for event in made])

            events[index] = submit(item, waits=made, label=index)

        return issue

    # --- the end of the iteration

    def _reduce(self, index: int, instr: ProgramInstr) -> _Issue:
        assert instr.stage is not None
        stage, item = instr.stage, partial(self._work.reduce, instr.stage)

        def issue() -> None:
            newest = self._last_weight.get(stage, self._applied)
            waits = () if newest is None else (newest,)
            self._comm.submit(item, waits=waits, label=index)

        return issue

    def _step_at(self, index: int) -> None:
        vote = self._comm.submit(self._work.vote, waits=self._after_compute(), label=index)
        self._applied = self._compute.submit(self._work.apply, waits=[vote], label=index)
        self._last_compute = self._applied


def _place(instr: ProgramInstr) -> tuple[int, Key]:
    assert instr.stage is not None
    assert instr.home is not None
    assert instr.microbatch is not None
    return instr.stage, (instr.home, instr.microbatch)


def _computed_on(
    compute: Callable[[Payload], Payload | None], load: Callable[[Event], Payload], made: Event
) -> Payload | None:
    return compute(load(made))


def _both(first: _Issue, second: _Issue) -> _Issue:
    def issue() -> None:
        first()
        second()

    return issue


def _nothing() -> None:
    pass
