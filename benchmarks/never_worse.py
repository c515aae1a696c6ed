"""Whether any policy ever beats ours, over random failure states of real models and clusters.

    python benchmarks/never_worse.py [--states N] [--seed S]

All policies are timed by the same simulator on plans that the verifier accepts. A state in which
another policy has a faster plan is printed, and makes the run fail. Oobleck's pipelines of
different depth are no plan that the language has, for they share no partition of the layers; they
are timed by the planner's player, and states in which they are faster are told apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from result_file import Row, print_table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "compiler"))
from failure_states import adapted_state, failure_state, told  # pyright: ignore[reportMissingImports]

from resihp.compiler.policies import POLICIES, outcomes

OURS = "resihp"
TOLERANCE = 1e-9


class Times(NamedTuple):
    """Of one state."""

    state: str
    seconds: dict[str, float | None]
    """By policy; None where it stops."""
    has_plan: dict[str, bool]
    """Whether the time is that of a plan."""


def times(seed: str) -> Times:
    """All policies on the state of `seed`; every second one is of a job adapted before."""
    is_chained = int(seed.split()[1]) % 2
    situation = adapted_state(seed) if is_chained else failure_state(seed)
    found = outcomes(situation, POLICIES)
    return Times(
        f"{seed}: {told(situation)}",
        {outcome.name: outcome.iteration_s for outcome in found},
        {outcome.name: outcome.plan is not None for outcome in found},
    )


def rows(found: Sequence[Times]) -> dict[str, Row]:
    """How much longer each policy takes than ours, where both answer."""
    table: dict[str, Row] = {}
    for name in POLICIES:
        ratios = sorted(
            theirs / ours
            for each in found
            if (theirs := each.seconds[name]) and (ours := each.seconds[OURS])
        )
        row: dict[str, float | int | str] = {
            "answers": sum(t.seconds[name] is not None for t in found)
        }
        if ratios and name != OURS:
            row["time / ours: least"] = f"{ratios[0]:.3f}"
            row["median"] = f"{median(ratios):.3f}"
            row["p90"] = f"{ratios[int(0.9 * len(ratios))]:.3f}"
            row["most"] = f"{ratios[-1]:.3f}"
            row["faster"] = sum(ratio < 1 - TOLERANCE for ratio in ratios)
        table[name] = row
    return table


def beaten(found: Sequence[Times], *, by_plans: bool) -> list[str]:
    """The states in which another policy is faster, or answers where ours does not."""
    lines: list[str] = []
    for each in found:
        ours = each.seconds[OURS] or float("inf")
        better = {
            name: seconds
            for name, seconds in each.seconds.items()
            if seconds and seconds < ours * (1 - TOLERANCE) and each.has_plan[name] == by_plans
        }
        if better:
            by = ", ".join(f"{name} {seconds / ours:.3f}" for name, seconds in better.items())
            lines.append(f"{each.state}: {by}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="policies compared over random failure states")
    parser.add_argument(
        "--states",
        type=int,
        default=1000,
        metavar="N",
        help="random failure states (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the states (default: %(default)s)")
    options = parser.parse_args()
    seeds = [f"{options.seed} {index}" for index in range(options.states)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(times, seeds, chunksize=10)
    print_table(f"{len(found)} failure states", rows(found))
    lines = beaten(found, by_plans=False)
    print(f"\nFaster by pipelines of different depth: {len(lines)} of {len(found)} states")
    print("\n".join(lines))
    lines = beaten(found, by_plans=True)
    print(f"\nFaster by a plan: {len(lines)} of {len(found)} states")
    if lines:
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
