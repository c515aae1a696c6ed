"""Closes and opens generations all the time, without losing a rank, and looks for what leaks.

    python benchmarks/reconfigure.py [--steps 700] [--generations 400]

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
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

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
GENERATIONS = "RESIHP_BENCH_GENERATIONS"
"""Environment of the coordinator: how many, where it is not the usual number."""


class RestlessCoordinator(Coordinator):
    """Closes generations for no reason."""

    _draw = random.Random(0)

    def tick(self, now_s: float) -> list[Action]:
        restless = self.generation < int(os.environ.get(GENERATIONS, NUM_GENERATIONS))
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
        return await Launcher(load(path), leader=command).run()

    code = asyncio.run(launch())
    if code != 0:
        raise RuntimeError(f"exit code {code}, see {folder}")
    (run,) = (folder / "runs").iterdir()
    return run, watcher


class Result(NamedTuple):
    """What happened while a job reconfigured all the time."""

    pauses_s: list[float]
    """From each closing until all run again, sorted."""
    num_fenced: int
    is_same: bool
    """Losses and samples are those of the run left alone."""
    samples: list[tuple[int, int, float]]
    """Descriptors, threads, MiB: the largest of all executors, once a second."""
    folder: Path

    @property
    def is_right(self) -> bool:
        return self.is_same and not self.num_fenced

    def pause_ms(self, share: float) -> float:
        """The pause that `share` of all do not pass."""
        return 1000 * self.pauses_s[min(len(self.pauses_s) - 1, int(share * len(self.pauses_s)))]


def measured(steps: int, num_generations: int) -> Result:
    """Run the job twice, once left alone."""
    folder = Path(tempfile.mkdtemp(prefix="resihp-reconfigure-"))
    os.environ[GENERATIONS] = str(num_generations)
    quiet, _ = run_job(folder / "quiet", steps, restless=False)
    run, watcher = run_job(folder / "restless", steps, restless=True)
    events = read(run, "events")
    times = [float(str(row["at_s"])) for row in events if row["event"] in ("restless", "running")]
    losses = [row["loss"] for row in read(run, "metrics")]
    same = losses == [row["loss"] for row in read(quiet, "metrics")]
    return Result(
        pauses_s=sorted(b - a for a, b in zip(times[1::2], times[2::2], strict=False)),
        num_fenced=sum(row["event"] in ("fence", "rank_lost") for row in events),
        is_same=same and read(run, "ledger") == read(quiet, "ledger"),
        samples=watcher.samples,
        folder=folder,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Reconfigure all the time and look for leaks.")
    parser.add_argument("--steps", type=int, default=700, help="iterations (default: %(default)s)")
    parser.add_argument(
        "--generations",
        type=int,
        default=NUM_GENERATIONS,
        help="after which it is left alone (default: %(default)s)",
    )
    args = parser.parse_args()
    result = measured(args.steps, args.generations)
    samples = result.samples
    head = f"{'':>12} {'descriptors':>12} {'threads':>8} {'RSS MiB':>8}"
    print(f"\n{head}   (largest of 8 executors)")
    for name, (fds, threads, rss) in (
        ("begin", samples[0]),
        ("middle", samples[len(samples) // 2]),
        ("end, quiet", samples[-1]),
    ):
        print(f"{name:>12} {fds:12.0f} {threads:8.0f} {rss:8.0f}")
    print(
        f"{len(result.pauses_s)} reconfigurations of 8 ranks: median {result.pause_ms(0.5):.0f} "
        f"ms, p99 {result.pause_ms(0.99):.0f} ms; {result.num_fenced} ranks fenced; losses and "
        f"ledger {'equal' if result.is_same else 'DIFFER'}"
    )
    if not result.is_right:
        print(f"kept in {result.folder}")
        return 1
    shutil.rmtree(result.folder)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--leader"]:
        sys.exit(leader_main(sys.argv[2:]))
    sys.exit(main())
