"""What the interpreter costs per instruction, without computing and without a network.

    python benchmarks/interpreter.py [--iterations N]

Work does nothing, messages are there at once, streams are the real threads. Printed per program:
CPU time of the event loop's thread and that of all threads together, with observation, the least
of several iterations; then what observing one instruction costs. The goal is 5 us per instruction
on the loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import uvloop
from options import at_least

from resihp.compiler import initial_plan
from resihp.executor.device.interface import Tag
from resihp.executor.interpreter.observe import Observation
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.stream import Event, ThreadStream
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Mesh, ModelShape
from resihp.ir.program import Program, TensorType
from resihp.wire.messages import StepRecord

SHAPE = ModelShape(name="any", layers=32, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=512)
RECORD = StepRecord.empty(0)
GOAL_US = 5.0
WARM_UP = 3
"""Iterations that are left out."""
CASES = (
    ("1f1b", 1, 64),
    ("zb-h1", 1, 64),
    ("interleaved-1f1b", 1, 64),
    ("zbv", 1, 64),
    ("1f1b", 2, 64),
)
"""Schedule, TP degree, micro-batches."""


class NoWork:
    """A `Work` that does nothing."""

    def begin(self, step: int) -> None:
        pass

    def forward(self, stage: int, key: tuple[int, int], x: Any) -> Any:
        return 1

    def backward_input(self, stage: int, key: tuple[int, int], dy: Any) -> Any:
        return 1

    def backward_weight(self, stage: int, key: tuple[int, int]) -> None:
        pass

    def num_bytes(self, tensor: TensorType) -> int:
        return tensor.num_bytes

    def chunk(self, payload: Any, chunk: int, num_chunks: int) -> Any:
        return payload

    def arrived(self, raw: Any, num_chunks: int) -> Any:
        return raw

    def gather(self, stage: int, chunks: Sequence[Any]) -> Any:
        return chunks[0]

    def reduce(self, stage: int) -> None:
        pass

    def vote(self) -> None:
        pass

    def apply(self) -> None:
        pass

    def record(self) -> StepRecord:
        return RECORD

    def discard(self) -> None:
        pass


class NoWire:
    """A `Wire` whose messages are there at once."""

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        return source

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        event = Event()
        event.set(1)
        return event


class Cost(NamedTuple):
    """us per instruction."""

    loop: float
    all_threads: float


def program_of(schedule: str, tp: int, num_microbatches: int) -> Program:
    """What a rank in the middle of a pipeline of 4 runs."""
    plan = initial_plan(
        SHAPE,
        Mesh(tp=tp, pp=4, dp=1),
        Batch(microbatches=num_microbatches, tokens=64),
        schedule=schedule,
        memory_bytes=None,
    )
    return expand(plan, tp)


async def measure(program: Program, num_iterations: int) -> Cost:
    """Least cost of an iteration, the first few left out."""
    compute, comm = ThreadStream("compute"), ThreadStream("comm")
    interpreter = Interpreter(program, NoWork(), compute=compute, comm=comm, wire=NoWire())
    costs: list[Cost] = []
    num = len(program.instrs)
    for step in range(num_iterations):
        loop_ns, all_ns = time.thread_time_ns(), time.process_time_ns()
        await interpreter.run(step)
        loop_ns, all_ns = time.thread_time_ns() - loop_ns, time.process_time_ns() - all_ns
        costs.append(Cost(loop_ns / num / 1e3, all_ns / num / 1e3))
    warm = costs[WARM_UP:]
    return Cost(min(cost.loop for cost in warm), min(cost.all_threads for cost in warm))


def observing_us(num: int = 100_000) -> float:
    """What start and end of one instruction cost, the least of several rounds."""
    observation, rounds_ns = Observation(num), list[int]()
    for _ in range(5):
        start_ns = time.thread_time_ns()
        for index in range(num):
            observation.began(index, time.monotonic_ns())
            observation.ended(index, time.monotonic_ns())
        rounds_ns.append(time.thread_time_ns() - start_ns)
        observation.clear(0)
    return min(rounds_ns) / num / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    least = WARM_UP + 1
    parser.add_argument(
        "--iterations",
        type=at_least(least),
        default=40,
        metavar="N",
        help=f"{least} or more (default: 40)",
    )
    arguments = parser.parse_args()
    labels = [f"{schedule}, tp {tp}, {num} micro-batches" for schedule, tp, num in CASES]
    width = max(map(len, labels))
    print(f"{'program':{width}}{'instructions':>14}{'loop us':>9}{'all us':>8}")
    worst = 0.0
    for label, (schedule, tp, num) in zip(labels, CASES, strict=True):
        program = program_of(schedule, tp, num)
        cost = uvloop.run(measure(program, arguments.iterations))
        instructions = len(program.instrs)
        print(f"{label:{width}}{instructions:14}{cost.loop:9.2f}{cost.all_threads:8.2f}")
        worst = max(worst, cost.loop)
    print(f"observing: {observing_us():.2f} us per instruction, in the figures above")
    print(f"worst on the loop: {worst:.2f} us per instruction; goal {GOAL_US:g}")


if __name__ == "__main__":
    main()
