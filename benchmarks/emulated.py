"""Emulated devices against the simulator: `make bench-emulated`.

Plans of 16 stages and more and more replicas run 1F1B with chunks of 20 to 1 ms (F; a backward
takes twice as long), micro-batches differ by a fifth, a message takes 50 us. In real time the
error is that of the host's clock, from the common begin until the host has seen the last rank end.
In virtual time the error is that of rounding to nanoseconds. Everything here is emulated.
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

from resihp.compiler import initial_plan
from resihp.compiler.cluster import Cluster, ClusterSize, Device, Health, Link
from resihp.compiler.costs import CostModel, Lengths, OpCost
from resihp.compiler.lane_times import lane_seconds
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.executor.emulation.report import EmulationReport, report_of
from resihp.executor.emulation.run import emulate
from resihp.ir.model import Batch, Mesh, ModelShape, Plan

_STAGES = 16
_TOKENS = 1000
_LINK = Link(gb_per_s=1e6, latency_us=50)


class Case(NamedTuple):
    """One row."""

    plan: Plan
    pricing: Pricing
    lengths: list[Lengths]

    def run(self, num_iterations: int, *, in_real_time: bool) -> EmulationReport:
        """Emulate it."""
        iterations = emulate(
            self.plan,
            lane_seconds(self.plan, self.pricing, self.lengths),
            num_iterations=num_iterations,
            in_real_time=in_real_time,
        )
        simulated_s = simulate(self.plan, self.pricing, lengths=self.lengths).iteration_s
        return report_of(self.plan, iterations, simulated_s)


def case(num_ranks: int, chunk_s: float, microbatches: int) -> Case:
    """1F1B over 16 stages whose F takes `chunk_s` for a micro-batch of all tokens."""
    dp = num_ranks // _STAGES
    plan = initial_plan(
        ModelShape(
            name="emulated", layers=_STAGES, hidden=64, heads=8, kv_heads=8, ffn=96, vocab=272
        ),
        Mesh(tp=1, pp=_STAGES, dp=dp),
        Batch(microbatches=microbatches, tokens=_TOKENS),
        schedule="1f1b",
    )
    each, free = OpCost(chunk_s / _TOKENS), OpCost(0.0)
    costs = CostModel(
        layer={1: (each, each, each)},
        head={1: (free, free, free)},
        boundary_bytes_per_token=1,
        layer_parameter_bytes=1,
        table_parameter_bytes=1,
    )
    cluster = Cluster(
        cluster=ClusterSize(name="emulated", nodes=num_ranks, gpus_per_node=1, nics_per_node=1),
        device=Device(memory_gib=1, bf16_tflops=1, fp32_tflops=1),
        intra_node=_LINK,
        inter_node=_LINK,
    )
    rng = random.Random(num_ranks)
    lengths = [Lengths.of([rng.randint(800, _TOKENS)]) for _ in range(dp * microbatches)]
    return Case(plan, Pricing(plan.model, costs, cluster, Health()), lengths)


def real_rows(ranks: list[int], chunks_ms: list[float], num_iterations: int) -> None:
    """The table of real time."""
    print("Real time, emulated: error against the simulator")
    print(
        "| ranks | F, ms | simulated, s | error | devices' clock | late starts | core | us/instr |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_ranks in ranks:
        for chunk_ms in chunks_ms:
            found = case(num_ranks, 1e-3 * chunk_ms, 16).run(num_iterations, in_real_time=True)
            assert found.error is not None
            assert found.device_error is not None
            late = found.num_late / (found.num_instrs * num_iterations)
            print(
                f"| {num_ranks} | {chunk_ms:g} | {found.simulated_s:.3f} | {found.error:+.3%} | "
                f"{found.device_error:+.3%} | {late:.2%} | {found.cpu_share:.0%} | "
                f"{1e6 * found.cpu_per_instr_s:.1f} |",
                flush=True,
            )


def virtual_rows(ranks: list[int]) -> None:
    """The table of virtual time."""
    print("\nVirtual time, emulated")
    print("| ranks | instructions | simulated, s | error | host, s | us/instr |")
    print("|---|---|---|---|---|---|")
    for num_ranks in ranks:
        found = case(num_ranks, 5e-3, 32).run(1, in_real_time=False)
        cpu_s = found.cpu_per_instr_s * found.num_instrs
        print(
            f"| {num_ranks} | {found.num_instrs:,} | {found.simulated_s:.3f} | {found.error:+.1e} |"
            f" {cpu_s:.2f} | {1e6 * found.cpu_per_instr_s:.1f} |",
            flush=True,
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[16, 64, 256, 1024],
        help="sizes of jobs (default: %(default)s)",
    )
    parser.add_argument(
        "--chunks-ms",
        type=float,
        nargs="+",
        default=[20, 5, 2, 1],
        help="times of F (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations", type=int, default=5, help="of each row in real time (default: %(default)s)"
    )
    args = parser.parse_args()
    real_rows(args.ranks, args.chunks_ms, args.iterations)
    virtual_rows([*args.ranks, 4096])


if __name__ == "__main__":
    main()
