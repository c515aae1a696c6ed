"""How long it takes to say who holds what after failures, and how often flapping devices count.

    python benchmarks/membership.py [--results FILE]

First table: CPU time of one warm process on one core, the least of several runs. "state" is what
is left of the plan before and whether all of it is alive, "members" who forms the groups (Eq. 4),
"lines" the reconfigure block for these groups, "repartition" the same when one layer also moves
from a stage to another one in every replica, "moves" its bytes and seconds by device and node.

Second table: a virtual clock, no device. How often a plan takes a device back, by how the device
behaves and by how much patience is asked for.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from language import timed
from result_file import Row, load_results, print_table, save_results

from resihp.compiler.adaptation import Situation
from resihp.compiler.adaptation.hysteresis import DEFAULT_PATIENCE, Patience, Trust
from resihp.compiler.adaptation.layouts import formed, on_layout, supplied
from resihp.compiler.adaptation.pp import held_layers
from resihp.compiler.adaptation.tp import RULES, choose_members
from resihp.compiler.cluster import Health, find_cluster
from resihp.compiler.costs import CostModel
from resihp.compiler.models import find_model
from resihp.compiler.partition import ranges_of
from resihp.compiler.pricing import Pricing
from resihp.compiler.sources import State, require_state
from resihp.compiler.state_traffic import state_traffic
from resihp.ir.model import Batch, Group, Mesh, Plan

DEFAULT_RESULTS = Path("runs/benchmarks/membership.json")
MODEL = find_model("llama2-70b")
NUM_ITERATIONS = 10_000


def layout_of(mesh: Mesh) -> Plan:
    """A healthy plan without streams, which nobody here looks at."""
    layers = ranges_of([MODEL.shape.layers // mesh.pp] * mesh.pp)
    groups = tuple(
        Group(replica=dp, pp=pp, ranks=tuple(range(first, first + mesh.tp)), layers=(layers[pp],))
        for dp in range(mesh.dp)
        for pp in range(mesh.pp)
        for first in ((dp * mesh.pp + pp) * mesh.tp,)
    )
    batch = Batch(microbatches=64, tokens=4096)
    return Plan(model=MODEL.shape, mesh=mesh, batch=batch, groups=groups, streams=())


def row_of(mesh: Mesh, num_lost: int, num_slow: int) -> Row:
    plan, cluster = layout_of(mesh), find_cluster("a100-2048x8")
    costs = CostModel.of_description(MODEL, cluster)
    bad = random.Random(0).sample(range(mesh.world), num_lost + num_slow)
    health = Health(lost=frozenset(bad[:num_lost]), speed=dict.fromkeys(bad[num_lost:], 0.5))
    situation = Situation(plan, Pricing(plan.model, costs, cluster, health))
    held = held_layers(situation)
    rule = RULES["fastest"]
    state_s, _ = timed(lambda: require_state(State(plan, situation.lost)), 5)
    members_s, members = timed(lambda: choose_members(situation, rule, held), 5)
    layout = formed(situation, members, held)
    lines_s, kept = timed(lambda: supplied(situation, layout), 5)
    counts = [last - first + 1 for ((first, last),) in held.values()]
    counts[1], counts[-2] = counts[1] - 1, counts[-2] + 1
    other = {pp: (layers,) for pp, layers in enumerate(ranges_of(counts))}
    moved = formed(situation, members, other)
    repartition_s, moved = timed(lambda: supplied(situation, moved), 5)
    after = on_layout(situation, moved)
    moves_s, traffic = timed(lambda: state_traffic(plan, after, situation.pricing), 3)
    return {
        "state ms": 1e3 * state_s,
        "members ms": 1e3 * members_s,
        "lines ms": 1e3 * lines_s,
        "lines": len(kept.reconfigure),
        "repartition ms": 1e3 * repartition_s,
        "its lines": len(moved.reconfigure),
        "moves ms": 1e3 * moves_s,
        "GB": traffic.num_bytes / 1e9,
        "predicted s": traffic.seconds,
    }


IsBad = Callable[[random.Random, bool], bool]
"""Whether the device is bad in an iteration; it may know whether the plan counts on it."""
DEVICES: dict[str, IsBad] = {
    "dies whenever it is used": lambda _, used: used,
    "fails in 1 of 10 iterations": lambda rng, _: rng.random() < 0.1,
    "fails in 1 of 100 iterations": lambda rng, _: rng.random() < 0.01,
    "fails in 1 of 1,000 iterations": lambda rng, _: rng.random() < 0.001,
}


def num_growths(is_bad: IsBad, patience: Patience) -> int:
    """How often the plan takes the device back, whatever that saves."""
    rng, trust, used, growths = random.Random(0), Trust(), True, 0
    for iteration in range(NUM_ITERATIONS):
        bad = is_bad(rng, used)
        trust = trust.seen(iteration, {0} if bad else (), patience)
        if bad:
            used = False
        elif not used and not trust.wait(0, iteration, patience):
            used, growths = True, growths + 1
    return growths


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
    rows = {
        "256 GPUs, 1 lost, 2 slow": row_of(Mesh(tp=4, pp=16, dp=4), 1, 2),
        "2,048 GPUs, 10 lost": row_of(Mesh(tp=8, pp=16, dp=16), 10, 0),
        "16,384 GPUs, 10 lost": row_of(Mesh(tp=8, pp=16, dp=128), 10, 0),
        "16,384 GPUs, 5 lost, 5 slow": row_of(Mesh(tp=8, pp=16, dp=128), 5, 5),
    }
    print_table("Who holds what", rows, before.get("membership"))
    patiences = {
        "at once": Patience(good_iterations=1, most_iterations=1),
        "after 8 good ones": Patience(good_iterations=8, most_iterations=8),
        "8, doubling to 1,024": DEFAULT_PATIENCE,
    }
    growths: dict[str, Row] = {
        device: {name: num_growths(is_bad, patience) for name, patience in patiences.items()}
        for device, is_bad in DEVICES.items()
    }
    print_table(f"Times taken back in {NUM_ITERATIONS:,} iterations", growths)
    save_results(args.results, {"membership": rows})


if __name__ == "__main__":
    main()
