"""Closes and opens generations all the time, without losing a rank, and looks for what leaks.

    python benchmarks/reconfigure.py [--steps 700]

A whole job (TP 2 x PP 2 x DP 2, eight executors) in which the coordinator closes the running
generation at random moments: every rank stops in the middle of whatever it does, builds all
groups anew and redoes the iteration. The table shows descriptors, threads and memory of the
executors at the begin, in the middle (old groups are released in the background) and at the
end, after more than a minute of rest. The command fails if a rank had to be fenced, if an
iteration was lost or doubled, or if the losses are not bitwise those of a run left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from small_job import job_text

from resihp.config import load
from resihp.monitor import leader
from resihp.monitor.actions import Action
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.launcher import Launcher

PROBABILITY = 0.1
"""Of a closed generation, at each tick of the coordinator while the job runs."""

NUM_GENERATIONS = 400
"""After these the job is left alone, so that what is still being released can go.

A collective that an abort missed keeps its group until its own time-out of a minute."""


class RestlessCoordinator(Coordinator):
    """Closes generations for no reason."""

    _draw = random.Random(0)

    def tick(self, now_s: float) -> list[Action]:
        restless = self.generation < NUM_GENERATIONS
        if self.phase is Phase.RUNNING and restless and self._draw.random() < PROBABILITY:
            self._core.now_s = now_s
            self._core.log("restless")
            self._membership.close()
        return super().tick(now_s)


def leader_main(fds: list[str]) -> int:
    leader.Coordinator = RestlessCoordinator  # type: ignore[misc]
    return leader.main(*map(int, fds))


def usage(pid: int) -> tuple[int, int, float]:
    """Descriptors, threads and resident MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return fds, int(fields["Threads"]), int(fields["VmRSS"].split()[0]) / 1024


class Watcher(threading.Thread):
    """Looks at the executors every second while the job runs."""

    def __init__(self, runs: Path) -> None:
        super().__init__(daemon=True)
        self._runs = runs
        self.samples: list[tuple[int, int, float]] = []

    def run(self) -> None:
        while True:
            time.sleep(1)
            for run in self._runs.glob("*"):
                rows = read(run, "events")
                pids = [int(str(r["pid"])) for r in rows if r["event"] == "executor_started"]
                if any(r["event"] == "running" for r in rows):
                    self._look(pids)

    def _look(self, pids: list[int]) -> None:
        try:
            seen = [usage(pid) for pid in pids]
        except (OSError, KeyError, ValueError):
            return  # the job ends
        fds, threads, rss = zip(*seen, strict=True)
        self.samples.append((max(fds), max(threads), max(rss)))


def read(run: Path, name: str) -> list[dict[str, object]]:
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_job(folder: Path, steps: int, *, restless: bool) -> tuple[Path, Watcher]:
    folder.mkdir()
    path = folder / "job.toml"
    path.write_text(job_text("reconfigure", folder / "runs", steps, detect_within_s=0.1))
    watcher = Watcher(folder / "runs")
    watcher.start()
    command = (__file__, "--leader") if restless else ("-m", "resihp.monitor.leader")

    async def launch() -> int:
        return await Launcher(load(path), path, leader=command).run()

    code = asyncio.run(launch())
    if code != 0:
        raise RuntimeError(f"exit code {code}, see {folder}")
    (run,) = (folder / "runs").iterdir()
    return run, watcher


def main() -> int:
    parser = argparse.ArgumentParser(description="Reconfigure all the time and look for leaks.")
    parser.add_argument("--steps", type=int, default=700, help="iterations (default: %(default)s)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="resihp-reconfigure-"))
    quiet, _ = run_job(folder / "quiet", args.steps, restless=False)
    run, watcher = run_job(folder / "restless", args.steps, restless=True)

    events = read(run, "events")
    times = [float(str(row["at_s"])) for row in events if row["event"] in ("restless", "running")]
    pauses = sorted(b - a for a, b in zip(times[1::2], times[2::2], strict=False))
    fenced = sum(row["event"] in ("fence", "rank_lost") for row in events)
    losses = [row["loss"] for row in read(run, "metrics")]
    same = losses == [row["loss"] for row in read(quiet, "metrics")]
    same_ledger = read(run, "ledger") == read(quiet, "ledger")

    middle, end = watcher.samples[len(watcher.samples) // 2], watcher.samples[-1]
    head = f"{'':>12} {'descriptors':>12} {'threads':>8} {'RSS MiB':>8}"
    print(f"\n{head}   (largest of 8 executors)")
    for name, (fds, threads, rss) in (
        ("begin", watcher.samples[0]),
        ("middle", middle),
        ("end, quiet", end),
    ):
        print(f"{name:>12} {fds:12.0f} {threads:8.0f} {rss:8.0f}")
    print(
        f"{len(pauses)} reconfigurations of 8 ranks: median {1000 * statistics.median(pauses):.0f} "
        f"ms, p99 {1000 * pauses[int(0.99 * len(pauses))]:.0f} ms; {fenced} ranks fenced; losses "
        f"{'bitwise equal' if same else 'DIFFER'}; ledger {'equal' if same_ledger else 'DIFFERS'}"
    )
    if not same or not same_ledger or fenced:
        print(f"kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--leader"]:
        sys.exit(leader_main(sys.argv[2:]))
    sys.exit(main())
