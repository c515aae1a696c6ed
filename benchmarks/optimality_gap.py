"""How far the planner's plans are from the best there are.

    python benchmarks/optimality_gap.py [--states N] [--larger N] [--limit-s S] [--keep FILE]

Random failure states (stages lost, slow or short of memory, transfers that take time, B and W
apart or fused) are planned, and OR-Tools' CP-SAT looks for something shorter. Small states are
solved to the proven optimum; of larger ones the solver often knows no more than a bound in its
time. FILE gets the small states that are hardest for a single play, with their optimum; the tests
read them.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from optimum import Optimum, optimum
from random_problems import LARGER, SMALL, Sizes, random_problem
from result_file import Row, print_table

from resihp.compiler.planner.algorithm1 import progress_rule
from resihp.compiler.planner.balance import balanced, homeless_placed
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.planned import Planned
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.search import search

NUM_KEPT = 40
TARGET_MEAN, TARGET_WORST = 0.02, 0.08

WAYS: dict[str, Callable[[Problem], Planned]] = {
    "search": lambda problem: search(problem)[0],
    "one play, work balanced": lambda problem: Engine(problem, balanced(problem)).run(),
    "one play, Algorithm 1 with guard": lambda problem: _algorithm_1(problem, guarded=True),
    "one play, Algorithm 1 literally": lambda problem: _algorithm_1(problem, guarded=False),
    "one play, only what is lost moves": lambda p: Engine(p, homeless_placed(p)).run(),
}


class Outcome(NamedTuple):
    """Of one state."""

    problem: Problem
    makespans: dict[str, int | None]
    """By way of planning; None where memory never had room."""
    best: Optimum
    floor: int
    """Least time by work and speed alone."""


def _algorithm_1(problem: Problem, *, guarded: bool) -> Planned:
    return Engine(problem, homeless_placed(problem), progress_rule(guarded=guarded)).run()


def outcome(seed: str, sizes: Sizes, limit_s: float) -> Outcome:
    """Plan and solve the state of `seed`."""
    problem = random_problem(seed, sizes)
    planned = {name: way(problem) for name, way in WAYS.items()}
    makespans = {name: plan.makespan if plan.complete else None for name, plan in planned.items()}
    ours = makespans["search"]
    assert ours is not None, f"the plan of state {seed} is incomplete"
    return Outcome(problem, makespans, optimum(problem, ours, limit_s), lower_bound(problem))


def gap_rows(outcomes: Sequence[Outcome]) -> dict[str, Row]:
    """Distribution of makespan / optimum - 1 of each way, over states with a proven optimum."""
    return {
        name: _distribution(
            [
                None if makespan is None else makespan / each.best.makespan - 1
                for each in outcomes
                for makespan in [each.makespans[name]]
            ]
        )
        for name in WAYS
    }


def larger_rows(outcomes: Sequence[Outcome]) -> dict[str, Row]:
    """Gaps of the search to what is known, proven and unproven apart."""
    proven = [each for each in outcomes if each.best.is_proven]
    unproven = [each for each in outcomes if not each.best.is_proven]

    def gaps(states: Sequence[Outcome], known: Callable[[Outcome], int]) -> Row:
        return _distribution([(each.makespans["search"] or 0) / known(each) - 1 for each in states])

    return {
        "proven: to the optimum": gaps(proven, lambda each: each.best.makespan),
        "proven: to work / speed": gaps(proven, lambda each: each.floor),
        "unproven: to the solver's best": gaps(unproven, lambda each: each.best.makespan),
        "unproven: to the solver's bound": gaps(unproven, lambda each: each.best.bound),
        "unproven: to work / speed": gaps(unproven, lambda each: each.floor),
    }


def _distribution(gaps: Sequence[float | None]) -> Row:
    known = sorted(gap for gap in gaps if gap is not None)
    row: dict[str, float | int | str] = {"states": len(known)}
    if known:
        row["exact"] = f"{sum(gap == 0 for gap in known) / len(known):.0%}"
        row["mean"] = _percent(sum(known) / len(known))
        for name, share in {"p50": 0.5, "p90": 0.9, "p99": 0.99}.items():
            row[name] = _percent(known[min(len(known) - 1, int(share * len(known)))])
        row["worst"] = _percent(known[-1])
    row["incomplete"] = len(gaps) - len(known)
    return row


def _percent(share: float) -> str:
    return f"{share:.2%}"


def kept(outcomes: Sequence[Outcome]) -> list[tuple[Problem, int]]:
    """The states whose single play is furthest from the optimum, with that."""

    def gap(each: Outcome) -> float:
        makespan = each.makespans["one play, work balanced"]
        return float("inf") if makespan is None else makespan / each.best.makespan

    hardest = sorted(outcomes, key=gap, reverse=True)[:NUM_KEPT]
    return [(each.problem, each.best.makespan) for each in hardest]


def main() -> None:
    parser = argparse.ArgumentParser(description="planned makespans beside proven optima")
    parser.add_argument("--states", type=int, default=260, metavar="N", help="small states")
    parser.add_argument("--larger", type=int, default=16, metavar="N", help="larger states")
    parser.add_argument("--limit-s", type=float, default=5.0, help="for one state")
    parser.add_argument("--seed", type=int, default=0, help="of the states (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where to write hard states")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        names = [f"{options.seed} {index}" for index in range(max(options.states, options.larger))]
        solve = partial(outcome, limit_s=options.limit_s)
        small = pool.map(partial(solve, sizes=SMALL), names[: options.states], chunksize=4)
        larger = pool.map(partial(solve, sizes=LARGER), names[: options.larger], chunksize=1)
    proven = [each for each in small if each.best.is_proven]
    rows = gap_rows(proven)
    print_table(f"Proven optima of {len(proven)} of {len(small)} small states", rows)
    print_table("Larger states", larger_rows(larger))
    if options.keep:
        lines = b",\n".join(map(msgspec.json.encode, kept(proven)))
        options.keep.write_bytes(b"[\n" + lines + b"\n]\n")
    found = [(each.makespans["search"] or 0) / each.best.makespan - 1 for each in proven]
    if found and (sum(found) / len(found) > TARGET_MEAN or max(found) > TARGET_WORST):
        raise SystemExit(f"target: mean {TARGET_MEAN:.0%}, worst {TARGET_WORST:.0%}")


if __name__ == "__main__":
    main()
