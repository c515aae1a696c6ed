"""Schedules beside what is published of them, and orders for slow links beside measurements.

    python benchmarks/schedules.py [--pipelines N] [--limit-s S]

Tables: bubbles and memory of every schedule, played, beside the published formula; the same
schedules on the paper's cluster as the simulator sees their lowered plans; automatic zero bubble
beside the proven optimum (OR-Tools' CP-SAT) on random pipelines; and what an iteration loses to one
slow link, beside the measurements of PipeMorph (arXiv 2504.19232).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import NamedTuple

from optimum import optimum
from result_file import Row, print_table

from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import find_model
from resihp.compiler.planner.automatic import automatic
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.problem import Capacity, Chunks, Problem, Replica
from resihp.compiler.planner.replay import planned_of
from resihp.compiler.planner.warmup import best_order_for_delays
from resihp.compiler.prediction import predict
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import Work, placed, schedule_order
from resihp.ir.model import Batch, Mesh, Op

STAGE = Chunks(9, 10, 6)
"""ms of F, B and W of a stage of PipeMorph's 14B model."""
FIRST_STAGE = Chunks(8, 10, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Schedules beside what is published of them.")
    parser.add_argument("--pipelines", type=int, default=300, help="random ones (default: 300)")
    parser.add_argument(
        "--limit-s", type=float, default=5.0, help="of the solver for each (default: 5)"
    )
    arguments = parser.parse_args()
    for num_positions, num_microbatches in ((4, 8), (8, 24)):
        title = f"Bubbles: {num_positions} positions, {num_microbatches} micro-batches"
        print_table(f"{title}, F, B, W = 9, 10, 6", bubbles(num_positions, num_microbatches))
    print_table("LLaMA-2 13B, TP 4, PP 8, 32 micro-batches of 4,096 tokens, A100", simulated())
    print_table(
        "Automatic zero bubble beside the optimum", optima(arguments.pipelines, arguments.limit_s)
    )
    print_table("Lost to one slow link, ms of an iteration", slow_links())


# --- bubbles


def bubbles(p: int, m: int) -> dict[str, Row]:
    """Formula and play of each schedule; times in those of a whole stage."""
    f, b, w = STAGE
    formulas = {
        "gpipe": ((p - 1) * (f + b + w), m),
        "1f1b": ((p - 1) * (f + b + w), p),
        "interleaved-1f1b": ((p - 1) * (f + b + w) / 2, (2 * (p - 1) + p + 1) / 2),
        "looped-bfs": ((p - 1) * (f + b + w) / 2, m),
        "zb-h1": ((p - 1) * (f + b - w), p),
        "zb-h2": ((p - 1) * (f + b - 2 * w), 2 * p - 1),
        "zbv": (0, p),
    }
    rows: dict[str, Row] = {}
    for kind, (formula, memory) in formulas.items():
        chunks = len(placed(kind, p)[0])
        spans = played(schedule_order(kind, p, m), chunks)
        rows[kind] = {
            "published bubble": float(formula) if kind != "zbv" else "0 at F = B = W",
            "played": max(end - begin for begin, end in spans) - m * sum(STAGE),
            "from first start to last end": max(end for _, end in spans) - m * sum(STAGE),
            "published memory": float(memory),
            "peak": max(peak(order) for order in schedule_order(kind, p, m)) / chunks,
        }
    for room in (p, 2 * p - 1):
        planned = automatic(pipeline([STAGE] * p, m, [0] * (p - 1), room))
        rows[f"zb-auto, memory {room}"] = {
            "published bubble": "",
            "played": "",
            "from first start to last end": float(planned.makespan - m * sum(STAGE)),
            "published memory": "",
            "peak": float(room),
        }
    return rows


def played(orders: Sequence[Sequence[Work]], num_chunks: int) -> list[tuple[float, float]]:
    """When each position begins and ends; transfers take no time."""
    f, b, w = (ticks / num_chunks for ticks in STAGE)
    cost = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}
    last = max(work.stage for order in orders for work in order)
    ends: dict[tuple[bool, int, int], float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    begins: dict[int, float] = {}
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for position, order in enumerate(orders):
            while places[position] < len(order):
                op, stage, number = order[places[position]]
                needs = _needed(op, stage, number, last)
                if needs is not None and needs not in ends:
                    break
                start = max(clocks[position], ends[needs] if needs is not None else 0.0)
                begins.setdefault(position, start)
                clocks[position] = start + cost[op]
                if op is not Op.W:
                    ends[op is not Op.F, stage, number] = clocks[position]
                places[position] += 1
    return [(begins[position], end) for position, end in enumerate(clocks)]


def _needed(op: Op, stage: int, number: int, last: int) -> tuple[bool, int, int] | None:
    if op is Op.W or (op is Op.F and stage == 0):
        return None
    if op is Op.F:
        return False, stage - 1, number
    return (False, stage, number) if stage == last else (True, stage + 1, number)


def peak(order: Sequence[Work]) -> int:
    """Most micro-batches between F and W at once."""
    alive = most = 0
    for work in order:
        alive += {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}[work.op]
        most = max(most, alive)
    return most


def pipeline(
    stages: Sequence[Chunks], num_microbatches: int, edges: Sequence[int], room: int
) -> Problem:
    """One replica; `room` activations from F to B, half of each until W."""
    memory = Capacity(free=2 * room, activation=2, released=1, held=0)
    row = Replica(tuple(stages), (memory,) * len(stages), tuple(edges))
    return Problem((row,), num_microbatches, (0,) * len(edges), split=True)


# --- on a cluster


def simulated() -> dict[str, Row]:
    """Healthy plans as the simulator sees them."""
    model, cluster = find_model("llama2-13b"), CLUSTERS["a100-32x8"]
    costs = CostModel.of_description(model, cluster)
    pricing = Pricing(model.shape, costs, cluster, Health())
    rows: dict[str, Row] = {}
    for kind in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "zb-auto"):
        recipe = Recipe(
            mesh=Mesh(tp=4, pp=8, dp=1),
            batch=Batch(microbatches=32, tokens=4096),
            schedule=kind,
            precision="bf16",
            memory_bytes=cluster.device.memory_bytes,
        )
        found = predict(healthy_plan(recipe, pricing), model, pricing)
        rows[kind] = {
            "iteration s": f"{found.iteration_s:.3f}",
            "bubble": f"{found.bubble_share:.1%}",
            "peak GiB": f"{found.peak_bytes / (1 << 30):.1f}",
        }
    return rows


# --- against the optimum


def optima(count: int, limit_s: float) -> dict[str, Row]:
    """By number of stages; what a schedule's name alone gives beside it."""
    rng = random.Random(5)
    ratios: dict[str, list[tuple[float, float]]] = {}
    unproven = 0
    for _ in range(count):
        given = random_pipeline(rng)
        found = automatic(given)
        best = optimum(given, found.makespan, limit_s)
        if not best.is_proven:
            unproven += 1
            continue
        named = [
            planned.makespan
            for kind in ("1f1b", "zb-h1", "zb-h2")
            if (
                planned := planned_of(
                    given, schedule_order(kind, given.num_stages, given.num_microbatches)
                )
            )
        ]
        pair = found.makespan / best.makespan, min(named) / best.makespan
        ratios.setdefault(f"{given.num_stages} stages", []).append(pair)
    rows: dict[str, Row] = {}
    for label in sorted(ratios):
        ours, named = zip(*ratios[label], strict=True)
        rows[label] = {
            "pipelines": len(ours),
            "optimal": f"{sum(ratio == 1 for ratio in ours) / len(ours):.0%}",
            "mean": f"+{sum(ours) / len(ours) - 1:.2%}",
            "worst": f"+{max(ours) - 1:.1%}",
            "best named schedule: mean": f"+{sum(named) / len(named) - 1:.2%}",
            "worst ": f"+{max(named) - 1:.1%}",
        }
    rows["not proven"] = {"pipelines": unproven}
    return rows


def random_pipeline(rng: random.Random) -> Problem:
    """Two to four stages, one of them slow, some of half the layers, room for P to 2 P."""
    p = rng.choice((2, 3, 4))
    m = rng.choice((p, 2 * p))
    base = rng.choice(((10, 10, 10), (9, 10, 6), (10, 14, 8), (10, 20, 10)))
    slow = {rng.randrange(p): rng.choice((1, 1, 1.3, 2))}
    stages = [
        Chunks(*(round(ticks * slow.get(s, 1) * rng.choice((1, 1, 0.5))) for ticks in base))
        for s in range(p)
    ]
    hop = rng.choice((0, 0, 2))
    return pipeline(stages, m, [hop] * (p - 1), rng.choice((p, p, 3 * p // 2, 2 * p)))


# --- slow links


class Measured(NamedTuple):
    """PipeMorph's iteration times, ms: healthy and with the delay, transfers left to CPUs."""

    stubborn: tuple[int, int]
    """The zero-bubble order as it was."""
    reordered: tuple[int, int, int]
    """Healthy, and the fastest and slowest run of its own orders."""


MEASURED = {
    ("14B", 8, 24, 30): Measured((753, 1173), (755, 825, 893)),
    ("14B", 8, 24, 60): Measured((753, 1655), (755, 895, 933)),
    ("7B", 4, 12, 30): Measured((393, 615), (398, 437, 437)),
    ("7B", 4, 12, 60): Measured((393, 866), (398, 494, 494)),
}
"""By model, stages, micro-batches and delay of the link before the last stage."""


def slow_links() -> dict[str, Row]:
    """What the delay costs: measured, and by our orders at the stage costs of the 14B model."""
    rows: dict[str, Row] = {}
    for (name, p, m, delay), seen in MEASURED.items():
        healthy = _with_link(p, m, 0)
        slow = _with_link(p, m, delay)
        least = automatic(healthy).makespan
        stubborn = planned_of(slow, schedule_order("zb-h2", p, m))
        assert stubborn is not None
        fast, slowest = (time - seen.reordered[0] for time in seen.reordered[1:])
        rows[f"{name}, {p} stages, {m} micro-batches, {delay} ms"] = {
            "measured, as it was": seen.stubborn[1] - seen.stubborn[0],
            "ZB-H2 in its order": stubborn.makespan - least,
            "measured, PipeMorph": str(fast) if fast == slowest else f"{fast}-{slowest}",
            "its rule": best_order_for_delays(slow).makespan - least,
            "zb-auto": automatic(slow).makespan - least,
            "with memory for all": automatic(_with_link(p, m, delay, room=m)).makespan - least,
            "no order below": lower_bound(slow) - least,
        }
    return rows


def _with_link(p: int, m: int, delay: int, room: int | None = None) -> Problem:
    """Room for 2 P activations where nothing is said, which is PipeMorph's own bound."""
    stages = [FIRST_STAGE, *[STAGE] * (p - 1)]
    return pipeline(stages, m, [*[0] * (p - 2), delay], 2 * p if room is None else room)


if __name__ == "__main__":
    main()
