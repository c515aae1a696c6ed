"""How far one slow GPU's delay spreads: to its TP group, its pipeline, and the other replicas.

    python benchmarks/amplification.py

The study of the paper's sections 3.1 and 8.3: LLaMA-2 13B, TP 4, DP 2, PP 4, one GPU at half speed.
A GPU's additional idle time is what it idles in an iteration more than without the fault; idle is
all time that its own work, at its own speed, does not take (waiting for a slow member of its TP
group is idle too, and so is standby). Sums over the GPUs of each level are told in units of the
slowdown of the faulty GPU itself: the additional time that its work takes it. The paper does not
say how it measures, nor the sizes of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from result_file import Row, print_table

from resihp.compiler.adaptation import Situation
from resihp.compiler.cluster import Health, find_cluster
from resihp.compiler.costs import CostModel
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import find_model
from resihp.compiler.policies import outcomes
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.ir.model import Batch, Mesh, Plan

MODEL, CLUSTER = "llama2-13b", "a100-32x8"
MESH = Mesh(tp=4, pp=4, dp=2)
FAULTY, SPEED = 5, 0.5
"""A GPU of the second stage."""
PAPER = {
    "without adaptation": {"GPU": 1.00, "TP": 4.75, "PP": 19.13, "DP": 25.43},
    "resihp": {"GPU": 0.64, "TP": 2.03, "PP": 8.72, "DP": 11.14},
}
"""Figure 2 and section 8.3."""


class Day(NamedTuple):
    """One iteration: its time, and what each rank works of it at its own speed."""

    iteration_s: float
    busy_s: list[float]


def day_of(plan: Plan, pricing: Pricing) -> Day:
    """Simulated; in a group with a slow member the others wait for part of each operation."""
    healthy = Pricing(pricing.shape, pricing.costs, pricing.cluster, Health())
    simulation = simulate(plan, pricing)
    slow = {each.group.name: each.busy_s for each in simulation.groups()}
    alone = {each.group.name: each.busy_s for each in simulate(plan, healthy).groups()}
    busy_s = [0.0] * plan.mesh.world
    for group in plan.groups:
        for rank in group.ranks:
            is_slow = rank in pricing.health.speed
            busy_s[rank] = (slow if is_slow else alone).get(group.name, 0.0)
    return Day(simulation.iteration_s, busy_s)


def levels() -> dict[str, list[int]]:
    """The other ranks of the faulty one's group, of its pipeline, and all others."""
    group = range(FAULTY // MESH.tp * MESH.tp, (FAULTY // MESH.tp + 1) * MESH.tp)
    size = MESH.tp * MESH.pp
    pipeline = range(FAULTY // size * size, (FAULTY // size + 1) * size)
    return {
        "TP": [rank for rank in group if rank != FAULTY],
        "PP": [rank for rank in pipeline if rank not in group],
        "DP": [rank for rank in range(MESH.world) if rank not in pipeline],
    }


def amplified(before: Day, after: Day, unit_s: float) -> dict[str, float]:
    """Additional time of each level in units of the faulty GPU's own slowdown."""

    def idle_s(ranks: Sequence[int]) -> float:
        longer_s = after.iteration_s - before.iteration_s
        return sum(longer_s - (after.busy_s[rank] - before.busy_s[rank]) for rank in ranks)

    own = (after.busy_s[FAULTY] - before.busy_s[FAULTY]) / unit_s
    return {"GPU": own, **{level: idle_s(ranks) / unit_s for level, ranks in levels().items()}}


def rows_of(schedule: str, microbatches: int) -> dict[str, Row]:
    """Every policy that does something about a slow GPU."""
    cluster, model = find_cluster(CLUSTER), find_model(MODEL)
    costs = CostModel.of_description(model, cluster)
    recipe = Recipe(
        mesh=MESH,
        batch=Batch(microbatches=microbatches, tokens=4096),
        schedule=schedule,
        precision="bf16",
        memory_bytes=cluster.device.memory_bytes,
    )
    fault_free = Pricing(model.shape, costs, cluster, Health())
    slow = Pricing(model.shape, costs, cluster, Health(speed={FAULTY: SPEED}))
    plan = healthy_plan(recipe, fault_free)
    before = day_of(plan, fault_free)
    unit_s = day_of(plan, slow).busy_s[FAULTY] - before.busy_s[FAULTY]
    names = {"without adaptation": "none"} | {n: n for n in ("greyhound", "adaptra", "resihp")}
    rows: dict[str, Row] = {}
    for label, name in names.items():
        (outcome,) = outcomes(Situation(plan, slow), [name])
        assert outcome.plan is not None, outcome.note
        day = day_of(outcome.plan, slow)
        shown = {level: f"{each:.2f}" for level, each in amplified(before, day, unit_s).items()}
        slower = f"{day.iteration_s / before.iteration_s:.3f}"
        rows[label] = {**shown, "iteration / fault-free": slower}
        if label in PAPER:
            rows[f"{label} (paper)"] = {k: f"{v:.2f}" for k, v in PAPER[label].items()}
    return rows


def main() -> None:
    for schedule, microbatches in (("1f1b", 8), ("zb-h1", 8), ("zb-h1", 16)):
        title = f"Additional GPU time, {schedule}, {microbatches} micro-batches"
        print_table(title, rows_of(schedule, microbatches))


if __name__ == "__main__":
    main()
