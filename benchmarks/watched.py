"""What watching costs while nothing fails: one job, whose watchers are stopped again and again.

    python benchmarks/watched.py [--ranks 2,8] [--seconds N]

Steps of two runs differ by more than what is sought: where a process has its memory alone moves
them by some percent. So one job runs, and all that watches it (launcher, supervisors, monitor,
coordinator) is stopped for a moment and goes on for two, in turn: executors do not notice. Steps
that lie in a pause of the watchers are compared with those that lie between two. What was to be
done in a pause is done after it, so the watchers cost a little less than what is found. What the
executors do for them is on both sides, and is not found (`fault_free.py` has it). The same run
tells what copies and audits cost, by the steps beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fault_free import LAYOUTS, begin_ns, job_text
from options import at_least, some_of

from resihp.chaos.usage import tagged
from resihp.monitor.listening import job_processes
from resihp.monitor.observations import observations

AUDIT_EVERY = 25
STATE = f"audit_every = {AUDIT_EVERY}"
"""Copies as a job file has them that says nothing of them."""
TAG = "RESIHP_WATCHED"
OFF_S, ON_S = 1.2, 2.4
"""Shorter than a lease, so that nobody finds that it stood still."""
NUM_STEPS = 1_000_000
WARM_UP = 10


class Found(NamedTuple):
    """Steps of one kind, ms."""

    what: str
    steps: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.steps)

    @property
    def error(self) -> float:
        """Of the mean."""
        return statistics.stdev(self.steps) / math.sqrt(len(self.steps))


def num_steps(folder: Path) -> int:
    rows = [path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl")]
    return sum(rows)


def pauses_of(watchers: Sequence[int], seconds: float) -> list[tuple[int, int]]:
    """Stop and continue `watchers`, parents first, for so long; when they stood still, ns."""
    pauses: list[tuple[int, int]] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            for pid in watchers:
                os.kill(pid, signal.SIGSTOP)
            begin = time.monotonic_ns()
            time.sleep(OFF_S)
            pauses.append((begin, time.monotonic_ns()))
        finally:
            for pid in reversed(watchers):
                os.kill(pid, signal.SIGCONT)
        time.sleep(ON_S)
    return pauses


def measured(num_ranks: int, seconds: float) -> list[Found]:
    """Run the job; its steps by what was beside them."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = folder / "job.toml"
        path.write_text(job_text(num_ranks, NUM_STEPS, STATE, folder))
        command = [sys.executable, "-m", "resihp", "train", str(path)]
        entry = f"{TAG}={os.getpid()}"
        env = os.environ | dict([entry.split("=")])
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env) as process:
            try:
                while num_steps(folder) < WARM_UP:
                    if process.poll() is not None:
                        sys.exit(f"the job ended with {process.returncode}")
                    time.sleep(0.2)
                mine = tagged(entry)
                watching = [each for each in job_processes() if each.module != "resihp.executor"]
                pauses = pauses_of([each.pid for each in watching if each.pid in mine], seconds)
            finally:
                process.terminate()
        (run,) = folder.glob("fault-free-*")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        copied = {row["step"] + 1 for row in rows if row["snapshot"]}
        begins = {seen.step: begin_ns(seen) for rank, seen in observations(run) if rank == 0}
    return sorted_by(begins, pauses, copied)


def sorted_by(
    begins: dict[int, int], pauses: Sequence[tuple[int, int]], copied: set[int]
) -> list[Found]:
    """Steps by kind; `copied` are those beside which the version before them is copied."""
    off, on, audited, copies = (list[float]() for _ in range(4))
    for step, begin in begins.items():
        end = begins.get(step + 1)
        if end is None or begin < pauses[0][0] or end > pauses[-1][1]:
            continue
        is_off = any(first <= begin and end <= last for first, last in pauses)
        is_on = all(end <= first or last <= begin for first, last in pauses)
        if step in copied:
            copies += [1e-6 * (end - begin)] * is_on
        elif (step + 1) % AUDIT_EVERY == 0:
            audited += [1e-6 * (end - begin)] * is_on
        else:
            off += [1e-6 * (end - begin)] * is_off
            on += [1e-6 * (end - begin)] * is_on
    return [
        Found("watchers stopped", off),
        Found("watched", on),
        Found("watched, beside a copy", copies),
        Found("watched, copies as they come", [*on, *copies]),
        Found("watched, with an audit", audited),
    ]


def print_found(num_ranks: int, found: Sequence[Found]) -> None:
    """Beside the steps without watchers; +- is the standard error."""
    print(f"{num_ranks} ranks, {os.cpu_count()} cores")
    off = found[0]
    for each in found:
        if min(len(each.steps), len(off.steps)) < 2:
            print(f"  {each.what:30}{len(each.steps):5} steps")
            continue
        error = 100 * math.hypot(each.error, off.error) / off.mean
        more = "" if each is off else f" {100 * (each.mean / off.mean - 1):+6.2f} % +- {error:.2f}"
        print(f"  {each.what:30}{len(each.steps):5} steps {each.mean:8.1f} ms{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs while nothing fails.")
    parser.add_argument("--seconds", type=at_least(10), default=240, help="(default: %(default)s)")
    parser.add_argument(
        "--ranks", type=some_of(LAYOUTS), default="2,8", help="2, 8 or both (default: %(default)s)"
    )
    args = parser.parse_args()
    for count in args.ranks:
        print_found(count, measured(count, args.seconds))


if __name__ == "__main__":
    main()
