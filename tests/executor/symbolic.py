"""Work that computes with names instead of numbers, and a wire inside one process.

A payload says what it is, so every computation can check that it got what the model needs,
whatever way it came. Streams are the real threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from resihp.executor.device.interface import Tag
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.stream import Event, ThreadStream
from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan
from resihp.ir.program import Program, TensorType
from resihp.wire.messages import StepRecord

FAR_S = 20.0
Key = tuple[int, int]


class Tensor:
    """The activation or gradient that `stage` made of a micro-batch; weakly referenced."""

    def __init__(self, kind: str, step: int, stage: int, key: Key) -> None:
        self.what = (kind, step, stage, key)


class Chunk(NamedTuple):
    """What a message holds."""

    whole: Tensor
    chunk: int
    num_chunks: int


class SymbolicWork:
    """A `Work` that checks its inputs and the order of everything."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.step = -1
        self.log: list[tuple[str, int, Key]] = []
        """F, B and W of the iteration as they ran."""
        self.ends: list[str] = []
        """Reductions, vote and update as they ran."""
        self.made: Callable[[Tensor], None] = lambda _: None
        self.num_discards = 0

    def begin(self, step: int) -> None:
        self.step = step
        self.log, self.ends = [], []

    def _done(self, what: str, stage: int, key: Key, before: Iterable[str] = ()) -> None:
        assert (what, stage, key) not in self.log
        for earlier in before:
            assert (earlier, stage, key) in self.log
        self.log.append((what, stage, key))

    def _tensor(self, kind: str, stage: int, key: Key) -> Tensor:
        tensor = Tensor(kind, self.step, stage, key)
        self.made(tensor)
        return tensor

    def forward(self, stage: int, key: Key, x: Tensor | None) -> Tensor | None:
        assert (x is None) == (stage == 0)
        assert x is None or x.what == ("act", self.step, stage - 1, key)
        self._done("F", stage, key)
        is_last = stage == self.program.num_stages - 1
        return None if is_last else self._tensor("act", stage, key)

    def backward_input(self, stage: int, key: Key, dy: Tensor | None) -> Tensor | None:
        assert (dy is None) == (stage == self.program.num_stages - 1)
        assert dy is None or dy.what == ("grad", self.step, stage + 1, key)
        self._done("B", stage, key, before="F")
        return None if stage == 0 else self._tensor("grad", stage, key)

    def backward_weight(self, stage: int, key: Key) -> None:
        self._done("W", stage, key, before="FB")

    def num_bytes(self, tensor: TensorType) -> int:
        return tensor.num_bytes

    def chunk(self, payload: Tensor, chunk: int, num_chunks: int) -> Chunk:
        return Chunk(payload, chunk, num_chunks)

    def arrived(self, raw: Chunk, num_chunks: int) -> Any:
        assert raw.num_chunks == num_chunks
        return raw.whole if num_chunks == 1 else raw

    def gather(self, stage: int, chunks: Sequence[Chunk]) -> Tensor:
        num, tp = chunks[0].num_chunks, self.program.tp
        owed = [c for c in range(num) if c * tp // num == self.program.tp_index]
        assert [chunk.chunk for chunk in chunks] == owed
        assert len({chunk.whole.what for chunk in chunks}) == 1
        return chunks[0].whole

    def reduce(self, stage: int) -> None:
        ran = {key for what, at, key in self.log if what == "W" and at == stage}
        assert ran == weights_of(self.program, stage)
        self.ends.append(f"reduce {stage}")

    def vote(self) -> None:
        assert sorted(self.ends) == sorted(f"reduce {stage}" for stage in self.program.stages)
        self.ends.append("vote")

    def apply(self) -> None:
        assert self.ends[-1] == "vote"
        self.ends.append("apply")

    def record(self) -> StepRecord:
        assert self.ends[-1] == "apply"
        return StepRecord.empty(self.step)

    def discard(self) -> None:
        self.num_discards += 1


def weights_of(program: Program, stage: int) -> set[Key]:
    """Micro-batches whose weight gradients of `stage` the program computes."""
    return {
        (instr.home or 0, instr.microbatch or 0)
        for instr in program.instrs
        if instr.op in (Op.W, Op.BW) and instr.stage == stage
    }


class Switch:
    """All mailboxes of one job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: dict[tuple[int, int, Tag], Event] = {}

    def event(self, source: int, target: int, tag: Tag) -> Event:
        """The event of one message, whoever asks first."""
        with self.lock:
            return self.events.setdefault((source, target, tag), Event())


class SwitchWire:
    """A `Wire` over a switch; a tag is used once each way."""

    def __init__(self, switch: Switch, rank: int) -> None:
        self.switch, self.rank = switch, rank
        self.num_sent = 0
        self.received: dict[Tag, Event] = {}

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        sent = Event()

        def post(source: Event) -> None:
            if source.error is not None:
                sent.fail(source.error)
                return
            message = source.wait()
            self.num_sent += 1
            arrived = self.switch.event(self.rank, peer, tag)
            assert not arrived.done, f"{tag} is sent twice"
            arrived.set(message if cut is None else cut(message))
            sent.set()

        source.when_done(post)
        return sent

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        event = self.switch.event(peer, self.rank, tag)
        self.received[tag] = event
        with self.switch.lock:
            del self.switch.events[peer, self.rank, tag]
            if not event.done:
                self.switch.events[peer, self.rank, tag] = event
        return event


class Pool:
    """Pairs of streams, used again by the next plan: threads are never ended."""

    def __init__(self) -> None:
        self.pairs: list[tuple[ThreadStream, ThreadStream]] = []

    def take(self, count: int) -> list[tuple[ThreadStream, ThreadStream]]:
        while len(self.pairs) < count:
            self.pairs.append((ThreadStream("compute"), ThreadStream("comm")))
        return self.pairs[:count]


POOL = Pool()


class Part(NamedTuple):
    """One rank of a running plan."""

    interpreter: Interpreter
    work: SymbolicWork
    wire: SwitchWire
    streams: tuple[ThreadStream, ThreadStream]


def parts_of(
    programs: Sequence[Program], make: Callable[[Program], SymbolicWork] = SymbolicWork
) -> list[Part]:
    """All ranks of a job, ready to run."""
    switch = Switch()
    parts: list[Part] = []
    for program, (compute, comm) in zip(programs, POOL.take(len(programs)), strict=True):
        work, wire = make(program), SwitchWire(switch, program.rank)
        interpreter = Interpreter(program, work, compute=compute, comm=comm, wire=wire)
        parts.append(Part(interpreter, work, wire, (compute, comm)))
    return parts


def programs_of(plan: Plan) -> list[Program]:
    return [expand(plan, rank) for rank in plan.active_ranks]


async def run_all(parts: Sequence[Part], step: int = 0) -> list[StepRecord]:
    """One iteration of all ranks."""
    async with asyncio.timeout(FAR_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.interpreter.run(step)) for part in parts]
    return [task.result() for task in running]
