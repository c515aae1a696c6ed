"""What copies and audits of the state cost: `make bench-state`, a table.

CPU time of one snapshot, one audit row and one checked parcel of a rank's state, and the time of
an iteration of the example job with and without them. Jobs take turns, since a machine's speed
drifts. `--rounds 0` leaves the jobs out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from resihp.config import load
from resihp.executor.audit import row_of
from resihp.executor.checksum import opened_parcel, sealed_parcel
from resihp.executor.models import build_model
from resihp.executor.snapshots.slots import Slots
from resihp.executor.snapshots.writer import manifest_of
from resihp.executor.state import TrainState, initial_holding
from resihp.ir.expand import expand
from resihp.monitor.planner import Planner

EXAMPLE = Path(__file__).parent.parent / "examples" / "stdlib.toml"
JOBS = {
    "nothing": "snapshot_every = 0\naudit_every = 0",
    "snapshots": "snapshot_every = 1\naudit_every = 0",
    "snapshots, audit every 10": "snapshot_every = 1\naudit_every = 10",
}


def cpu_ms(work: Callable[[], object], repeats: int = 15) -> float:
    """Median CPU time of this thread."""
    times: list[float] = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return 1000 * statistics.median(times)


def print_costs() -> None:
    """Of one rank of the example."""
    torch.set_num_threads(1)
    job = load(EXAMPLE)
    model = build_model(job.model)
    program = expand(Planner(job).initial().plan, 0)
    holding = initial_holding(model, job, program)
    state, kinds = TrainState(job), holding.kinds()
    size = 4 * sum(tensor.numel() for kind in kinds for tensor in kind.values())
    parts = [tensor.reshape(-1) for tensor in holding.parameters.values()]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        slots, keep = Slots(Path(folder), 0), None
        manifest = manifest_of(0, 1, 1, 1, holding.parameters)
        slots.reserve(manifest, keep)
        rows = {
            "snapshot": cpu_ms(lambda: slots.write(manifest, kinds, keep)),
            "sums of an audit": cpu_ms(lambda: row_of(model, state, holding)),
            "parcel sealed and opened": cpu_ms(lambda: opened_parcel(sealed_parcel(parts))),
        }
    print(f"CPU time of one rank, {size / 1e6:.1f} MB of state")
    for name, value in rows.items():
        print(f"  {name:26} {value:8.2f} ms")


def iteration_ms(sections: str, steps: int) -> float:
    """Median iteration of a run of the example without faults."""
    text = EXAMPLE.read_text().partition("[[inject]]")[0]
    head, _, tail = text.partition("[state]")
    tail = tail[tail.index("[checkpoint]") :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        text = f"{head}[state]\n{sections}\n{tail}".replace("steps = 60", f"steps = {steps}")
        path.write_text(text.replace('runs_dir = "runs"', f'runs_dir = "{folder}/runs"'))
        command = [sys.executable, "-m", "resihp", "train", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        (run,) = (Path(folder) / "runs").iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return 1000 * statistics.median(row["iteration_s"] for row in rows[5:])


def print_jobs(rounds: int, steps: int) -> None:
    """Beside the job with nothing, in the same round."""
    times: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(rounds):
        for name, sections in JOBS.items():
            times[name].append(iteration_ms(sections, steps))
    print(f"median iteration of the example, {rounds} rounds of {steps} steps")
    for name, values in times.items():
        ratios = [one / base for one, base in zip(values, times["nothing"], strict=True)]
        slower = 100 * (statistics.median(ratios) - 1)
        print(f"  {name:26} {statistics.median(values):8.1f} ms  {slower:+5.1f} %")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print_costs()
    if args.rounds:
        print_jobs(args.rounds, args.steps)


if __name__ == "__main__":
    main()
