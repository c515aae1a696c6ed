"""The measured targets of surviving faults, as one table: eight executors on this machine.

    python benchmarks/resilience.py [--parts kills,hang,reconfigure,crowd] [--faults 40]
                                    [--generations 1000] [--crowd-minutes 5] [--json FILE]

`kills` alternates SIGKILL and SIGSTOP to random ranks of a job whose ranks come back; `hang` holds
the GIL of one rank for ever, so that its supervisor beats and it does nothing; `reconfigure` closes
generations for no reason (`reconfigure.py`); `crowd` runs the job beside six busy processes per
core and looks for ranks that were taken for dead. The command fails where something is lost,
doubled or different, or a rank was evicted that did nothing wrong; times are judged by the reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from reconfigure import measured
from small_job import WORLD, job_text

from resihp.chaos.mix import Strike
from resihp.chaos.play import Chaos, Limits, Played
from resihp.chaos.score import percentile
from resihp.config import Injection, JobConfig, RejoinConfig, loads
from resihp.wire.timing import Timing

PARTS = ("kills", "hang", "reconfigure", "crowd")
HANG_S = 300.0
CROWD = 6
"""Busy processes per core."""
Rows = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """One line of the table."""

    what: str
    target: str
    found: str
    is_wrong: bool = False


def job_of(folder: Path, steps: int) -> JobConfig:
    """The job of all parts; ranks that are lost come back at once."""
    job = loads(job_text("resilience", folder / "runs", steps))
    return msgspec.structs.replace(job, rejoin=RejoinConfig(restarts=100, good_iterations=1))


# --- reading events


def detections_ms(events: Rows, kind: str) -> list[float]:
    """From each fault of `kind` until its rank was counted as lost."""
    found: list[float] = []
    hits: dict[int, float] = {}
    for row in events:
        if row["event"] == "fault" and row["fault"] == kind:
            hits[row["rank"]] = row["hit_s"]
        elif row["event"] == "rank_lost" and row["rank"] in hits:
            found.append(1000 * (row["at_s"] - hits.pop(row["rank"])))
    return found


def incident_ms(events: Rows, name: str) -> list[float]:
    """From the verdict until `name` (a time of an incident)."""
    incidents = [row for row in events if row["event"] == "incident"]
    return [1000 * (r[name] - r["detected_s"]) for r in incidents if r.get(name) is not None]


def _percentiles(times_ms: Sequence[float]) -> str:
    if not times_ms:
        return "none"
    p50, p99 = percentile(times_ms, 0.5), percentile(times_ms, 0.99)
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, n = {len(times_ms)}"


# --- parts


def kills(folder: Path, num_faults: int) -> Iterator[Line]:
    """SIGKILL and SIGSTOP, one after the other."""
    folder.mkdir()
    chaos = Chaos(job_of(folder, 300), folder, Limits(num_faults, None, HANG_S), print)
    scores = asyncio.run(chaos.run(_alternating()))
    events: list[Mapping[str, Any]] = []
    for path in sorted(folder.glob("job*/runs/*/events.jsonl")):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    beat_s = Timing.from_detect_within(1.0).beat_s
    yield Line("SIGKILL noticed", "p99 < 250 ms", _percentiles(detections_ms(events, "kill")))
    yield Line(
        "SIGSTOP noticed, killed",
        f"3 beats ({3000 * beat_s:.0f} ms) + fence",
        _percentiles(detections_ms(events, "stop")),
    )
    yield Line("survivors have left", "< 100 ms", _percentiles(incident_ms(events, "noticed_s")))
    recovered = incident_ms(events, "resumed_s")
    yield Line("recovered, with state", "< 2,000 ms", _percentiles(recovered))
    faults = sum(score.num_faults for score in scores)
    yield Line("faults per hour", ">= 240", f"{3600 * faults / chaos.seconds:.0f}")
    wrong = [each for score in scores for each in score.violations]
    yield Line("hangs, samples, hashes, leaks", "none", "; ".join(wrong) or "none", bool(wrong))


def _alternating() -> Iterator[Strike]:
    draw = random.Random(0)
    while True:
        for kind in ("kill", "stop"):
            yield Strike(2 + draw.expovariate(0.5), draw.randrange(WORLD), kind, kind, None)


def hang(folder: Path) -> Iterator[Line]:
    """A rank whose supervisor beats and that does nothing."""
    folder.mkdir()
    stuck = Injection(kind="hold_gil", rank=3, step=5, lasts_s=1e5)
    job = msgspec.structs.replace(job_of(folder, 12), inject=(stuck,))
    chaos = Chaos(job, folder, Limits(None, None, HANG_S), print)
    played = Played(job, folder / "hang")
    code = asyncio.run(played.play(iter(()), chaos))
    found = detections_ms(played.rows("events"), "hold_gil")
    timing = Timing.from_detect_within(1.0)
    # Chunks of this job are far shorter; what moved last is known a report and two beats later.
    bound_s = timing.hang_bound_s(0.0) + timing.report_s + 2 * timing.beat_s
    said = f"{found[0]:.0f} ms" if found else f"not: exit code {code}"
    yield Line("silent hang noticed", f"{bound_s:.1f} s + fence", said, is_wrong=code != 0)


def reconfigure(num_generations: int) -> Iterator[Line]:
    """Generations for no reason."""
    result = measured(num_generations + 300, num_generations)
    samples = result.samples
    begin, middle, end = samples[0], samples[len(samples) // 2], samples[-1]
    said = f"median {result.pause_ms(0.5):.0f} ms, p99 {result.pause_ms(0.99):.0f} ms"
    yield Line("groups built anew", "< 500 ms", said)
    yield Line(
        f"after {len(result.pauses_s)} reconfigurations",
        "flat",
        f"descriptors {begin[0]}, {middle[0]}, {end[0]}, "
        f"threads {begin[1]}, {middle[1]}, {end[1]}, "
        f"RSS {begin[2]:.0f}, {middle[2]:.0f}, {end[2]:.0f} MiB (begin, middle, end)",
        is_wrong=not result.is_right,
    )
    if result.is_right:
        shutil.rmtree(result.folder)


def crowd(folder: Path, minutes: float) -> Iterator[Line]:
    """False evictions on a machine with far too much to do."""
    folder.mkdir()
    num_busy = CROWD * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        ends_s = time.monotonic() + 60 * minutes
        seen: list[Mapping[str, Any]] = []
        num_steps, number, codes = 0, 0, list[int]()
        while time.monotonic() < ends_s:
            job = job_of(folder, 60)
            played = Played(job, folder / f"crowd{number}")
            chaos = Chaos(job, folder, Limits(None, None, HANG_S), print)
            codes.append(asyncio.run(played.play(iter(()), chaos)))
            seen += played.rows("events")
            num_steps += len(played.rows("metrics"))
            number += 1
    finally:
        for process in busy:
            process.kill()
            process.wait()
    evicted = [row for row in seen if row["event"] in ("evict", "fence", "rank_lost", "reopen")]
    yield Line(
        f"evicted beside {num_busy} busy processes",
        "0",
        f"{len(evicted)} in {minutes:g} min, {num_steps} steps, {number} jobs",
        is_wrong=bool(evicted) or any(codes),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The measured targets of surviving faults.")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--faults", type=int, default=40, help="of kills (default: %(default)s)")
    parser.add_argument(
        "--generations", type=int, default=1000, help="of reconfigure (default: %(default)s)"
    )
    parser.add_argument(
        "--crowd-minutes", type=float, default=5.0, help="(default: %(default)s; 60 is the target)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table there")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    folder = Path(tempfile.mkdtemp(prefix="resihp-resilience-"))
    lines: list[Line] = []
    if "kills" in parts:
        lines += kills(folder / "kills", args.faults)
    if "hang" in parts:
        lines += hang(folder / "hang")
    if "reconfigure" in parts:
        lines += reconfigure(args.generations)
    if "crowd" in parts:
        lines += crowd(folder / "crowd", args.crowd_minutes)
    width = max(len(line.what) for line in lines)
    print()
    for line in lines:
        mark = "  WRONG" if line.is_wrong else ""
        print(f"{line.what:<{width}}  {line.target:<28}  {line.found}{mark}")
    if args.json is not None:
        args.json.write_text(json.dumps([line._asdict() for line in lines], indent=1) + "\n")
    if any(line.is_wrong for line in lines):
        print(f"kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
