"""How long reading and proving plans take, beside torch's own checks of the same schedules.

    python benchmarks/language.py [--results FILE] [--no-torch]

CPU time of one warm process on one core, the least of several runs without garbage collection, in
ms where nothing else is said. "arrays" is made once for every plan that is read and kept with it;
"verify" has it already. Numbers that changed by more than a seventh since the run before, which is
in FILE, say so.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# One core, as the targets say; before numpy is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import msgspec
from result_file import Row, load_results, print_table, save_results
from whole_plans import Shape, make_whole_plan

from resihp.ir.arrays import arrays_of
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.model import GroupName, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.source import Parsed
from resihp.ir.verify import verify
from resihp.ir.verify.fast import proofs
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.ranges import check_ranges, check_sizes
from resihp.ir.verify.topology import check_topology

DEFAULT_RESULTS = Path("runs/benchmarks/language.json")
PROOF_TARGET_NS = 100
"""Per instruction: exactly once, data flow, channel order, memory and progress."""
_NOT_PROVED = ("ranges", "topology")
"""Areas that the target does not count."""

_Result = TypeVar("_Result")


def timed(run: Callable[[], _Result], repeats: int = 5) -> tuple[float, _Result]:
    """The least CPU seconds of several runs, and the result of the last one."""
    results: list[tuple[float, _Result]] = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        results.append((time.process_time() - start, result))
    gc.enable()
    return min(seconds for seconds, _ in results), results[-1][1]


def plans() -> dict[str, Plan]:
    """The plans that the targets speak of, and harder ones."""
    name = GroupName
    small, large = Shape(4, 16, 4, 32), Shape(8, 16, 128, 64)
    interleaved = [(pp, pp + 16) for pp in range(16)]
    ten = [name(5, 3), name(77, 15)], {name(7 * i + 1, i): 1.3 + i / 10 for i in range(8)}
    return {
        "256 GPUs": make_whole_plan(small),
        "256 GPUs, 1 dead, 2 slow": make_whole_plan(
            small, gone=[name(1, 5)], slow={name(0, 3): 1.6, name(2, 9): 1.3}
        ),
        "256 GPUs, interleaved": make_whole_plan(
            Shape(4, 16, 4, 32, interleaved), gone=[name(1, 5)]
        ),
        "16,384 GPUs": make_whole_plan(large),
        "16,384 GPUs, 10 failures": make_whole_plan(large, gone=ten[0], slow=ten[1]),
        "16,384 GPUs, replicas differ": make_whole_plan(large, jitter=0.3),
        "2 GPUs, 8,192 micro-batches": make_whole_plan(Shape(1, 2, 1, 8192)),
    }


def facts_of(plan: Plan) -> Facts:
    """Sizes like those of a large model; what matters is that memory is accounted at all."""
    sizes = StageFacts(
        state_bytes=20 << 30,
        activation_bytes=180 << 20,
        released_by_b_bytes=100 << 20,
        weight_input_grad_bytes=60 << 20,
        boundary_bytes=16 << 20,
    )
    return Facts(stages={group.name: (sizes,) * len(group.layers) for group in plan.groups})


def language_rows(plan: Plan) -> tuple[Row, Row]:
    """Times of everything that is done with one plan, and what they are per instruction."""
    plan = msgspec.structs.replace(plan, memory_bytes=10**15)
    num_instrs = sum(len(stream.replicas) * len(stream.body) for stream in plan.streams)
    repeats = 7 if num_instrs < 100_000 else 3
    printing_s, text = timed(lambda: print_plan(plan), 3)
    parsing_s, parsed = timed(lambda: parse(text), 3)
    facts = facts_of(plan)
    arrays_s, _ = timed(lambda: arrays_of(parsed.plan), repeats)
    areas = area_seconds(parsed, facts, repeats)
    assert not verify(parsed, facts=facts)
    verify_s, _ = timed(lambda: verify(parsed, facts=facts), repeats)
    proof_s = sum(seconds for area, seconds in areas.items() if area not in _NOT_PROVED)
    times = {
        "print": 1e3 * printing_s,
        "parse": 1e3 * parsing_s,
        "arrays": 1e3 * arrays_s,
        **{area: 1e3 * seconds for area, seconds in areas.items()},
        "verify": 1e3 * verify_s,
    }
    each = {
        "instructions": num_instrs,
        "parse M/s": num_instrs / parsing_s / 1e6,
        "arrays ns": 1e9 * arrays_s / num_instrs,
        "proof ns": 1e9 * proof_s / num_instrs,
        f"of {PROOF_TARGET_NS} ns": f"{1e9 * proof_s / num_instrs / PROOF_TARGET_NS:.0%}",
        "verify ns": 1e9 * verify_s / num_instrs,
    }
    return times, each


def area_seconds(parsed: Parsed, facts: Facts, repeats: int) -> dict[str, float]:
    """Least seconds of each area of the verifier on a clean plan."""
    best: dict[str, float] = {}

    def note(area: str, start: float) -> float:
        now = time.process_time()
        best[area] = min(best.get(area, now - start), now - start)
        return time.process_time()

    arrays = arrays_of(parsed.plan)
    assert arrays is not None
    for _ in range(repeats):
        findings = Findings()
        start = time.process_time()
        check_sizes(parsed, findings)
        check_ranges(parsed, findings)
        start = note("ranges", start)
        check_topology(parsed, findings)
        start = note("topology", start)
        for area, is_proved in proofs(arrays, lambda: facts):
            assert is_proved, area
            start = note(area, start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="times of reading and proving plans")
    parser.add_argument(
        "--results",
        type=Path,
        default=DEFAULT_RESULTS,
        metavar="FILE",
        help="results of the run before, then of this one (default: %(default)s)",
    )
    parser.add_argument("--no-torch", action="store_true", help="leave torch's checks out")
    options = parser.parse_args()
    before = load_results(options.results)
    tables: dict[str, dict[str, Row]] = {"Plans, ms": {}, "Plans, per instruction": {}}
    for label, plan in plans().items():
        for table, row in zip(tables.values(), language_rows(plan), strict=True):
            table[label] = row
    if not options.no_torch:
        from torch_checks import broken_rows, speed_rows

        tables["The same schedules in torch, ms"] = speed_rows(timed)
        tables["What is found"] = broken_rows()
    for title, rows in tables.items():
        print_table(title, rows, before.get(title))
    save_results(options.results, tables)


if __name__ == "__main__":
    main()
