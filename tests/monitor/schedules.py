"""`make schedules`: many seeded schedules of faults over whole simulated clusters, as a table.

    python tests/monitor/schedules.py [--schedules N] [--seed FIRST] [--family NAME] [--processes P]

One that fails is named with its family and seed, and is the same whenever it is run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from typing import NamedTuple

from sim_faults import FAMILIES, run_schedule


class Told(NamedTuple):
    """What one schedule came to."""

    family: str
    seed: int
    outcome: str
    failure: str
    rarities: frozenset[str]


def told(job: tuple[str, int]) -> Told:
    family, seed = job
    try:
        outcome, rarities = run_schedule(family, seed)
    except Exception as error:
        return Told(family, seed, "", f"{type(error).__name__}: {error}", frozenset())
    return Told(family, seed, outcome, "", rarities)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=sorted(FAMILIES), default=None)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    families = [args.family] if args.family else list(FAMILIES)
    jobs = [(families[i % len(families)], args.seed + i) for i in range(args.schedules)]
    began_s = time.monotonic()
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        all_told = pool.map(told, jobs, chunksize=20)
    print(table(families, all_told))
    took_s = time.monotonic() - began_s
    failures = [each for each in all_told if each.failure]
    for each in failures[:20]:
        print(f"FAILED --family {each.family} --seed {each.seed} --schedules 1: {each.failure}")
    print(f"{len(jobs)} schedules in {took_s:.0f} s, {len(failures)} failed")
    return 1 if failures else 0


def table(families: list[str], all_told: list[Told]) -> str:
    """How often each end and each rare case came up, by family."""
    rows: Counter[tuple[str, str]] = Counter()
    for each in all_told:
        rows[f"end: {each.outcome or 'FAILED'}", each.family] += 1
        for rarity in each.rarities:
            rows[rarity, each.family] += 1
    names = sorted({name for name, _ in rows}, key=lambda name: (not name.startswith("end"), name))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{family:>13}" for family in families)]
    for name in names:
        lines.append(name.ljust(width) + "".join(f"{rows[name, f]:13}" for f in families))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
