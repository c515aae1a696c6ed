"""Real iterations beside the makespan that the simulator has for their own chunk times.

    python benchmarks/real_iteration.py [--iterations N] [--tokens N ...]

Two ranks, each with a core of its own, run 8 micro-batches of a LLaMA of 5.7 M parameters: F, B and
W, from a common start to the end of the last one. "own" plays the plan with what each chunk took in
that very iteration, so what is left is what the runtime adds: hand-overs, messages, the loop.
"medians" plays it once with the median of each kind of chunk on each stage, as a profile says it:
what one would have predicted. Messages cost nothing in either. Real over played, medians over the
iterations, and the middle half of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from executor_cases import NUM_MICROBATCHES, SCHEDULES, Case
from executor_ours import GradientWork, imported
from options import at_least
from result_file import Row, print_table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fleet"))
from fleet import Fleet
from run_work import Site, generation

from resihp.compiler.cluster import Health
from resihp.compiler.defaults import pricing_of_plan
from resihp.compiler.schedules import schedule_order
from resihp.compiler.simulate import Simulator
from resihp.compiler.simulate.times import Floats, Prices, play
from resihp.executor.interpreter.run import Interpreter
from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan

RANKS = 2
"""One for each core of the machine that the figures of the docs are from."""
WARM_UP = 3
ORDERS = {"1F1B": "1f1b", "ZB, 1 stage a rank": "zb-h1", "ZBV": "zbv"}
"""Our names of the schedules."""


class Task(NamedTuple):
    case: Case
    num_iterations: int


class Iteration(NamedTuple):
    """One rank's part of an iteration, ns of the monotonic clock."""

    begin_ns: int
    starts_ns: list[int]
    """By instruction of its program; 0 where nothing was seen."""
    ends_ns: list[int]


async def observe(site: Site) -> list[Iteration]:
    """Iterations of one rank, all ranks beginning together."""
    task: Task = site.argument
    program = expand(site.plan, site.rank)
    work = GradientWork(task.case, site.rank, "fast")
    found: list[Iteration] = []
    async with generation(site) as groups:
        world = groups.build("world", site.plan.active_ranks)
        await site.device.connect(program.send_targets)
        device = site.device
        interpreter = Interpreter(
            program, work, compute=device.compute, comm=device.comm, wire=device.wire
        )
        for step in range(WARM_UP + task.num_iterations):
            meeting = device.comm.submit(lambda: world.all_reduce_(torch.zeros(1)))
            await meeting.wait_async()
            await interpreter.run(step)
            seen = interpreter.observation
            found.append(Iteration(meeting.at_ns, list(seen.starts_ns), list(seen.ends_ns)))
        interpreter.discard()
    return found[WARM_UP:]


def order_of(case: Case) -> Plan:
    """The plan that all ranks run."""
    letters = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
    works = schedule_order(ORDERS[case.schedule_name], case.num_ranks, NUM_MICROBATCHES)
    rows = [[f"{w.stage}{letters[w.op]}{w.microbatch}" for w in row] for row in works]
    return imported(case, rows)


class Played:
    """The simulator with times of our own for F, B, W and BW; all else is free."""

    def __init__(self, plan: Plan) -> None:
        self._course = Simulator(plan, pricing_of_plan(plan, Health())).course
        arrays = self._course.arrays
        self._first = {
            group.ranks[0]: int(start)
            for start, pp in zip(arrays.lanes.start, arrays.lanes.pp, strict=False)
            for group in plan.groups
            if group.pp == pp
        }
        self._num_delays = len(self._course.crossings[0])
        self.programs = {rank: expand(plan, rank).instrs for rank in plan.active_ranks}

    def makespan_s(self, durations_s: Mapping[int, Sequence[float]]) -> float:
        """With these times of each rank's instructions."""
        duration: Floats = np.zeros(self._course.arrays.lanes.num_instrs)
        for rank, instrs in self.programs.items():
            for index, instr in enumerate(instrs):
                if instr.op.is_compute:
                    duration[self._first[rank] + index] = durations_s[rank][index]
        return play(self._course, Prices(duration, np.zeros(self._num_delays))).makespan


def row_of(case: Case, plan: Plan, found: dict[int, list[Iteration]]) -> Row:
    played = Played(plan)
    kinds: dict[tuple[int, Op, int | None], list[float]] = defaultdict(list)
    real_s: list[float] = []
    own: list[float] = []
    for parts in zip(*found.values(), strict=True):
        durations = {
            rank: [1e-9 * (end - start) for start, end in zip(p.starts_ns, p.ends_ns, strict=True)]
            for rank, p in zip(found, parts, strict=True)
        }
        begin_ns = max(part.begin_ns for part in parts)
        end_ns = max(
            part.ends_ns[index]
            for rank, part in zip(found, parts, strict=True)
            for index, instr in enumerate(played.programs[rank])
            if instr.op.is_compute
        )
        real_s.append(1e-9 * (end_ns - begin_ns))
        own.append(real_s[-1] / played.makespan_s(durations))
        for rank, instrs in played.programs.items():
            for index, instr in enumerate(instrs):
                kinds[rank, instr.op, instr.stage].append(durations[rank][index])
    middle = {kind: statistics.median(times) for kind, times in kinds.items()}
    predicted_s = played.makespan_s(
        {
            rank: [middle[rank, instr.op, instr.stage] for instr in instrs]
            for rank, instrs in played.programs.items()
        }
    )
    low, _, high = statistics.quantiles(own, n=4)
    return {
        "real, ms": 1e3 * statistics.median(real_s),
        "real / own": f"{statistics.median(own):.4f}",
        "middle half": f"{low:.4f} .. {high:.4f}",
        "real / medians": f"{statistics.median(real_s) / predicted_s:.4f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--iterations", type=at_least(2), default=15, metavar="N", help="2 or more (default: 15)"
    )
    parser.add_argument(
        "--tokens",
        type=at_least(1),
        nargs="+",
        default=[1024, 256, 32],
        metavar="N",
        help="of a micro-batch (default: 1024 256 32)",
    )
    args = parser.parse_args()
    rows: dict[str, Row] = {}
    with Fleet(RANKS) as fleet:
        for num_tokens in args.tokens:
            for name in ORDERS:
                assert name in SCHEDULES
                case = Case(name, RANKS, num_tokens)
                plan = order_of(case)
                found = fleet.run(plan, observe, Task(case, args.iterations))
                rows[f"{name}, {num_tokens} tokens"] = row_of(case, plan, found)
    print_table("A real iteration over the simulator's, 2 ranks", rows)


if __name__ == "__main__":
    main()
