"""The fault sequences of a public reproduction: victims one after the other, until nothing is left.

    python benchmarks/sequences.py [NAME ...]

TP 2 x PP 2 x DP 2, six layers, eight executors; nobody comes back. `random` kills random victims
until no plan can carry on (two seeds); `stage0` kills one rank every two iterations until stage 0
of both replicas is empty; `last` does the same to the last stage. `peers` kills both holders of a
shard in one iteration: its snapshots are left, and in `peers-saved`, where there are none, a
checkpoint. Every run must end with 0, or with 4 where no plan can carry the loss, with all losses
and samples those of the run without failures, and with nothing left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from small_job import WORLD, job_text

from resihp.chaos.play import Chaos, Limits, Played
from resihp.chaos.score import RunScore
from resihp.config import CheckpointConfig, Injection, JobConfig, RejoinConfig, StateConfig, loads

STEPS = 24
FIRST, EVERY = 3, 2
"""The iteration of the first death, and how many lie between two."""
HANG_S = 120.0


class Case(NamedTuple):
    """A job with its deaths."""

    name: str
    deaths: tuple[tuple[int, int], ...]
    """(rank, step)."""
    state: StateConfig = StateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def cases() -> list[Case]:
    """Ranks of TP 2 x PP 2 x DP 2: a rank is 4 * replica + 2 * stage + member."""
    orders = [random.Random(seed).sample(range(WORLD), WORLD) for seed in (0, 1)]
    peers = ((1, FIRST), (5, FIRST))
    return [
        Case("random-0", _one_by_one(orders[0])),
        Case("random-1", _one_by_one(orders[1])),
        Case("stage0", _one_by_one((0, 4, 1, 5))),
        Case("last", _one_by_one((2, 6, 3, 7))),
        Case("peers", peers),
        Case("peers-saved", peers, StateConfig(snapshot_every=0), CheckpointConfig(every=2)),
    ]


def _one_by_one(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((rank, FIRST + EVERY * number) for number, rank in enumerate(ranks))


def job_of(case: Case | None, folder: Path) -> JobConfig:
    """The job of a case; None: without failures."""
    job = loads(job_text("sequences", folder / "runs", STEPS))
    job = msgspec.structs.replace(
        job,
        model=msgspec.structs.replace(job.model, num_hidden_layers=6),
        rejoin=RejoinConfig(restarts=0),
    )
    if case is None:
        return job
    return msgspec.structs.replace(
        job,
        state=case.state,
        checkpoint=case.checkpoint,
        inject=tuple(
            # Peers die before one can hear of the other's death.
            Injection(rank=rank, step=step, instruction=0 if "peers" in case.name else None)
            for rank, step in case.deaths
        ),
    )


async def run_all(wanted: Sequence[Case], folder: Path) -> list[RunScore]:
    """The score of each case."""
    chaos = Chaos(job_of(None, folder), folder, Limits(None, None, HANG_S), print)
    healthy = await chaos.reference()
    scores: list[RunScore] = []
    for number, case in enumerate(wanted):
        played = Played(job_of(case, folder), folder / case.name)
        code = await played.play(iter(()), chaos)
        score = played.score(number, code, healthy)
        scores.append(score)
        lost = [row["rank"] for row in played.rows("events") if row["event"] == "rank_lost"]
        worst = max(score.recovery_ms, default=0.0)
        print(
            f"{case.name:<12} {len(lost)} lost ({', '.join(map(str, lost))}), "
            f"{score.num_incidents} incidents survived, slowest recovery {worst:.0f} ms, "
            f"{score.num_steps} steps, "
            f"{score.num_bitwise} bitwise, worst difference {score.worst_difference:.1e}, "
            f"exit {code}: {score.ended.splitlines()[0]}",
            flush=True,
        )
        for violation in score.violations:
            print(f"  VIOLATION: {violation}", flush=True)
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description="Fault sequences of a public reproduction.")
    names = [case.name for case in cases()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    given = parser.parse_args().names or names
    if unknown := set(given) - set(names):
        parser.error(f"no sequence {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    folder = Path(tempfile.mkdtemp(prefix="resihp-sequences-"))
    scores = asyncio.run(run_all([case for case in cases() if case.name in given], folder))
    if any(score.violations for score in scores):
        print(f"kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
