"""Kills one random rank at a random instruction, many times, and compares with the run without.

    python benchmarks/random_kills.py [--runs 20] [--seed 0]

Each run is a whole job (TP 2 x PP 2 x DP 2, eight executors) that loses one rank by SIGKILL at
an instruction drawn from its program, anywhere from the first forward to the vote. The table
shows when the coordinator knew, when all survivors ran again, how much of the interrupted
iteration was lost, and how far the final loss is from that of the run without a failure. The
command fails if a run hangs, ends with an error, or has another loss or another sample ledger.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_job import WORLD, job_text

from resihp.compiler import initial_plan
from resihp.config import load
from resihp.ir.expand import expand

STEPS = 12
TIME_LIMIT_S = 120.0
TOLERANCE = 1e-5


def program_length(job: Path, rank: int) -> int:
    """Number of instructions of a rank's healthy program."""
    config = load(job)
    plan = initial_plan(
        config.model.shape("kills"),
        config.parallel.mesh(),
        config.batch.batch(),
        schedule=config.parallel.schedule,
        memory_bytes=config.device.memory_bytes,
    )
    return len(expand(plan, rank).instrs)


def rows(run: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def run_job(folder: Path, schedule: str, kill: tuple[int, int, int] | None) -> Path:
    """Run one job to its end; its run directory. Raises where it hangs or fails."""
    folder.mkdir(parents=True)
    text = job_text("kills", folder / "runs", STEPS, schedule=schedule)
    if kill is not None:
        rank, step, instruction = kill
        text += f'[[inject]]\nkind = "kill"\nrank = {rank}\nstep = {step}\n'
        text += f"instruction = {instruction}\n"
    job = folder / "job.toml"
    job.write_text(text)
    command = [sys.executable, "-m", "resihp", "train", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    (folder / "console").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    (run,) = (folder / "runs").iterdir()
    return run


def one_kill(folder: Path, number: int, seed: int, reference: Path, schedule: str) -> list[float]:
    """One row of the table: detection ms, recovery ms, lost work s, difference of the loss."""
    draw = random.Random(seed * 1000 + number)
    rank, step = draw.randrange(WORLD), draw.randrange(2, STEPS - 1)
    instruction = draw.randrange(program_length(folder / "reference" / "job.toml", rank))
    run = run_job(folder / f"run{number}", schedule, (rank, step, instruction))
    (incident,) = [row for row in rows(run, "events") if row["event"] == "incident"]
    losses, expected = (
        [float(str(row["loss"])) for row in rows(path, "metrics")] for path in (run, reference)
    )
    if rows(run, "ledger") != rows(reference, "ledger"):
        raise RuntimeError(f"run {number}: another sample ledger; see {run}")
    if incident["ranks"] != [rank]:
        raise RuntimeError(f"run {number}: ranks {incident['ranks']} were lost; see {run}")
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if worst > TOLERANCE:
        raise RuntimeError(f"run {number}: the loss differs by {worst:.1e}; see {run}")
    row = [float(str(incident[k])) for k in ("detection_ms", "recovery_ms", "lost_work_s")]
    final = losses[-1] - expected[-1]
    print(
        f"{number:4d} {rank:5d} {step:5d} {instruction:6d} {row[0]:10.0f} {row[1]:10.0f} "
        f"{row[2]:9.2f} {worst:14.1e} {final:+14.1e}",
        flush=True,
    )
    return [*row, worst]


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills against a run without failures.")
    parser.add_argument(
        "--runs", type=int, default=20, help="runs, each with one kill (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of ranks, steps and instructions (default: %(default)s)",
    )
    parser.add_argument(
        "--schedule", default="zb-h1", help="of the pipeline (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="resihp-kills-"))
    started_s = time.monotonic()
    reference = run_job(folder / "reference", args.schedule, None)
    print(" run  rank  step  instr  detect ms  recover ms  lost s  max rel diff  final loss diff")
    table = [
        one_kill(folder, number, args.seed, reference, args.schedule) for number in range(args.runs)
    ]
    columns = list(zip(*table, strict=True))
    for name, pick in (("median", statistics.median), ("max", max)):
        cells = [float(pick(column)) for column in columns]
        print(f"{name:>22} {cells[0]:10.0f} {cells[1]:10.0f} {cells[2]:9.2f} {cells[3]:14.1e}")
    print(
        f"{args.runs} kills: no hang, no other loss (tolerance {TOLERANCE:g} relative), every "
        f"sample used once; {time.monotonic() - started_s:.0f} s"
    )
    if args.keep:
        print(f"kept in {folder}")
    else:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
