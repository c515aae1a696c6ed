"""How long simulations take, per instruction.

    python benchmarks/simulator.py [--results FILE]

CPU time of one warm process on one core, the least of several runs without garbage collection.
The plans are those of `benchmarks/language.py`. "first" plays a plan that the verifier has read
into arrays, to start and end of every instruction; "length only" asks for the time of the
iteration and no more; "again" plays it once more with other lengths of documents, all replicas
apart; "queues" is with transfers that queue for links. An instruction counts once for every
replica that runs it.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from language import plans, timed
from result_file import Row, load_results, print_table, save_results

from resihp.compiler.cluster import Health, find_cluster
from resihp.compiler.costs import CostModel, Lengths
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import Simulation, Simulator, simulate
from resihp.ir.arrays import arrays_of
from resihp.ir.model import Plan

DEFAULT_RESULTS = Path("runs/benchmarks/simulator.json")
TARGET_NS = 50
"""Per instruction of a large plan."""
TARGET_SMALL_MS = 2
"""For 256 GPUs."""


def everything(simulation: Simulation) -> None:
    """Ask for start and end of every instruction. Nothing is kept, as in a loop that compares."""
    assert simulation.start[-1] <= simulation.end[-1]


def row_of(plan: Plan) -> Row:
    cluster = find_cluster("a100-2048x8")
    costs = CostModel.of_description(find_model("llama2-13b"), cluster)
    pricing = Pricing(plan.model, costs, cluster, Health())
    num_instrs = sum(len(stream.replicas) * len(stream.body) for stream in plan.streams)
    repeats = 9 if num_instrs < 100_000 else 5
    arrays = arrays_of(plan)
    first_s, _ = timed(lambda: everything(simulate(plan, pricing, arrays=arrays)), repeats)
    total_s, _ = timed(lambda: simulate(plan, pricing, arrays=arrays).iteration_s, repeats)
    simulation = simulate(plan, pricing, arrays=arrays)
    rng = random.Random(0)
    lengths = [
        Lengths.of((rng.randint(1, plan.batch.tokens),))
        for _ in range(plan.mesh.dp * plan.batch.microbatches)
    ]
    simulator = Simulator(plan, pricing, apart=True)
    again_s, _ = timed(lambda: everything(simulator.run(lengths)), repeats)
    queues_s, _ = timed(lambda: everything(simulate(plan, pricing, contention=True)), 1)
    return {
        "instructions": num_instrs,
        "played": simulation.arrays.lanes.num_instrs,
        "first ms": 1e3 * first_s,
        "ns per instruction": 1e9 * first_s / num_instrs,
        "length only ms": 1e3 * total_s,
        "again ms": 1e3 * again_s,
        "ns per instruction, again": 1e9 * again_s / num_instrs,
        "queues ms": 1e3 * queues_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results",
        type=Path,
        default=DEFAULT_RESULTS,
        help="results of the run before, then of this one (default: %(default)s)",
    )
    args = parser.parse_args()
    before = load_results(args.results)
    rows = {label: row_of(plan) for label, plan in plans().items()}
    print_table("Simulations", rows, before.get("simulations"))
    print(f"\nThe aims are {TARGET_NS} ns, and {TARGET_SMALL_MS} ms for 256 GPUs.")
    save_results(args.results, {"simulations": rows})


if __name__ == "__main__":
    main()
