"""What one partition of the layers for all replicas costs, beside a partition for each.

    python benchmarks/uniformity.py [--states N] [--seed S]

A plan has one partition for all replicas, so that any of them can run any micro-batch of a stage.
Here the planner also plays replicas that each have the best partition for their own groups; then
no work can move between them, since their stages are not the same. Times are compute makespans.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

import msgspec
from result_file import Row, print_table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "compiler"))
from failure_states import failure_state  # pyright: ignore[reportMissingImports]

from resihp.compiler.adaptation import ANYTHING, TICK_S, Layout, Situation, problem_of
from resihp.compiler.adaptation.candidates import candidates
from resihp.compiler.adaptation.planning import plan_well
from resihp.compiler.adaptation.pp import SHARES, repartitioned
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Group, LayerRange

BUDGET = 4_000
SLOWEST = SHARES["slowest replica"]


def makespan_s(situation: Situation, groups: Sequence[Group], *, move: bool) -> float | None:
    """Seconds of compute of the best play; None where memory never has room."""
    layout = Layout(tuple(groups), (), tuple(sorted(situation.lost)))
    problem = problem_of(situation, layout)
    planned, _ = plan_well(problem, ANYTHING, move=move, budget=BUDGET)
    return planned.makespan * TICK_S if planned.complete else None


def own_partitions(situation: Situation, groups: Sequence[Group]) -> list[Group] | None:
    """The groups, each replica with the layers that are best for it alone."""
    found: list[Group] = []
    for replica in range(situation.previous.mesh.dp):
        own = [group for group in groups if group.replica == replica]
        members = {group.name: group.ranks for group in own}
        ranges = repartitioned(situation, members, SLOWEST)
        if ranges is None:
            return None
        found += [with_layers(group, ranges[group.pp]) for group in own]
    return found


def with_layers(group: Group, layers: LayerRange) -> Group:
    return msgspec.structs.replace(group, layers=(layers,))


def uniform_layouts(situation: Situation) -> list[Sequence[Group]]:
    """Those in which every replica has all stages."""
    whole = situation.previous.mesh.dp * situation.previous.mesh.pp
    layouts = [each.layout.groups for each in candidates(situation)]
    return [groups for groups in layouts if len(groups) == whole]


def times(situation: Situation) -> tuple[float, float, float] | None:
    """Uniform without moves, a partition for each, uniform with moves; None where one fails."""
    try:
        layouts = uniform_layouts(situation)
    except NoFeasiblePlan:
        return None
    if not layouts:
        return None
    own = own_partitions(situation, layouts[0])
    alone = None if own is None else makespan_s(situation, own, move=False)
    same_members = {group.name: frozenset(group.ranks) for group in layouts[0]}
    alike = [
        groups
        for groups in layouts
        if {group.name: frozenset(group.ranks) for group in groups} == same_members
    ]
    still = [each for groups in alike if (each := makespan_s(situation, groups, move=False))]
    moved = [each for groups in alike if (each := makespan_s(situation, groups, move=True))]
    if alone is None or not still or not moved:
        return None
    return min(still), alone, min(moved)


def states(num_states: int, seed: int) -> Iterator[tuple[float, float, float]]:
    """Times of random failure states in which something is degraded and nobody lacks a stage."""
    found = number = 0
    while found < num_states:
        situation = failure_state(f"{seed}/{number}")
        number += 1
        health = situation.pricing.health
        if not (health.lost or health.speed):
            continue
        each = times(situation)
        if each is not None:
            found += 1
            yield each


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--states", type=int, default=200, help="random failure states (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the states (default: %(default)s)")
    args = parser.parse_args()
    found = list(states(args.states, args.seed))
    ratios = {
        "a partition for each / one for all, nothing moves": [own / one for one, own, _ in found],
        "one for all, work moves / nothing moves": [moved / one for one, _, moved in found],
        "one for all, work moves / a partition for each": [moved / own for _, own, moved in found],
    }
    table: dict[str, Row] = {
        name: {
            "mean": mean(values),
            "median": median(values),
            "least": min(values),
            "most": max(values),
            "share below 1": sum(value < 1 - 1e-9 for value in values) / len(values),
        }
        for name, values in ratios.items()
    }
    print_table(f"Compute makespans of {len(found)} states", table)


if __name__ == "__main__":
    main()
