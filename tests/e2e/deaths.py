"""Deaths of a rank at every place of a job, as real processes, and what must hold after each.

    python tests/e2e/deaths.py [--every N] [--layers N]     all of them: `make sweep`

A place is an instruction of a rank's program, the vote, the time between vote and update, the
update, or a phase of the recovery from an earlier death. After each the job must end by itself,
with every loss that of the run without failures, bit by bit (no TP degree changes), from the same
samples, and with nothing left behind.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jobs import Job, Run, complete, copy_corpus

from resihp.compiler import initial_plan
from resihp.config import load
from resihp.ir.expand import expand

JOB = Job(steps=6, tp=1, pp=2, dp=2, sections="[rejoin]\nrestarts = 0\n")
STEP = 3
FIRST_VICTIM = 3
"""Who dies before a death in recovery; the other ranks but 1 can then be lost too."""
STEP_MOMENTS = ("vote", "voted", "update")
RECOVERY_MOMENTS = ("groups", "state", "joined")


class Death(NamedTuple):
    """Where a rank dies."""

    rank: int
    place: int | str
    """Instruction, or moment."""

    @property
    def injection(self) -> str:
        """For the job file."""
        where = "instruction" if isinstance(self.place, int) else "moment"
        place = self.place if isinstance(self.place, int) else f'"{self.place}"'
        return _kill(self.rank, f"{where} = {place}")

    @property
    def is_in_recovery(self) -> bool:
        return self.place in RECOVERY_MOMENTS

    @property
    def victims(self) -> set[int]:
        return {self.rank, FIRST_VICTIM} if self.is_in_recovery else {self.rank}


def _kill(rank: int, place: str) -> str:
    return f'[[inject]]\nkind = "kill"\nrank = {rank}\nstep = {STEP}\n{place}\n'


def all_deaths(job_file: Path) -> Iterator[Death]:
    """Every place of every rank."""
    config = load(job_file)
    plan = initial_plan(
        config.model.shape("deaths"),
        config.parallel.mesh(),
        config.batch.batch(),
        schedule=config.parallel.schedule,
        memory_bytes=config.device.memory_bytes,
    )
    for rank in range(JOB.world):
        for instruction in range(len(expand(plan, rank).instrs)):
            yield Death(rank, instruction)
        for moment in STEP_MOMENTS:
            yield Death(rank, moment)
    for rank in (0, 2):
        for moment in RECOVERY_MOMENTS:
            yield Death(rank, moment)


def died(death: Death, folder: Path, corpus: Path, layers: int = JOB.layers) -> tuple[int, Run]:
    """Run the job, with a model of `layers`, with this death; exit code and what it left."""
    first = _kill(FIRST_VICTIM, "") if death.is_in_recovery else ""
    sections = JOB.sections + first + death.injection
    return complete(replace(JOB, sections=sections, layers=layers), folder, corpus)


def wrong_after(death: Death, code: int, run: Run, healthy: Run) -> list[str]:
    """What does not hold."""
    found: list[str] = []
    if code != 0:
        return [f"exit code {code}\n{run.text}"]
    if run.losses() != healthy.losses():
        found.append("other losses than without the death")
    if run.rows("ledger") != healthy.rows("ledger"):
        found.append("other samples than without the death")
    lost = {rank for row in run.events("incident") for rank in row["ranks"]}
    if not lost <= death.victims:
        found.append(f"ranks {sorted(lost - death.victims)} were lost too")
    # A death in or after the vote may come when the rank has nothing left to do in the job.
    if not lost and death.place not in STEP_MOMENTS:
        found.append("nobody was lost")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="A death at every place of a job.")
    parser.add_argument("--every", type=int, default=1, help="only every n-th (default: all)")
    parser.add_argument(
        "--layers",
        type=int,
        default=JOB.layers,
        help="of the model (4). With 2 none can move, so what others finished is kept",
    )
    args = parser.parse_args()
    every, layers = args.every, args.layers
    folder = Path(tempfile.mkdtemp(prefix="resihp-deaths-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    copy_corpus(corpus)
    (folder / "healthy").mkdir()
    code, healthy = complete(replace(JOB, layers=layers), folder / "healthy", corpus)
    assert code == 0, healthy.text
    deaths = list(all_deaths(folder / "healthy" / "job.toml"))[::every]
    began_s, num_wrong = time.monotonic(), 0
    for number, death in enumerate(deaths):
        place = folder / f"death{number}"
        place.mkdir()
        code, run = died(death, place, corpus, layers)
        wrong = wrong_after(death, code, run, healthy)
        num_wrong += bool(wrong)
        incidents = run.events("incident")
        times = ", ".join(
            f"seen {row['detection_ms'] or 0:.0f} ms, recovered {row['recovery_ms']:.0f} ms, "
            f"{100 * row['redone_share']:.0f} % redone"
            for row in incidents
        )
        said = "; ".join(wrong) or "ok"
        print(f"rank {death.rank} at {death.place!s:>6}: {said}  {times}", flush=True)
        if not wrong:
            shutil.rmtree(place)
    elapsed_s = time.monotonic() - began_s
    print(f"{len(deaths)} deaths, {num_wrong} with something wrong; {elapsed_s:.0f} s")
    if num_wrong:
        print(f"kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
