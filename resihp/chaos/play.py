"""Plays faults against real jobs, one job after the other, and looks at what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resihp.chaos.mix import Strike
from resihp.chaos.reference import Reference, reference_of
from resihp.chaos.score import RunScore, judged, num_calm
from resihp.chaos.usage import Growth, Usage, growth_of, shared_memory, tagged, usage_of
from resihp.config import JobConfig, resolved
from resihp.errors import UserError
from resihp.monitor.operator import inject_fault
from resihp.monitor.process import Child

__all__ = ["Chaos", "Limits", "Played"]

TAG = "RESIHP_CHAOS"
LOOK_S = 0.5
"""Between two looks at a job."""
START_S = 240.0
GONE_S = 10.0
"""How long what a job started may take to be gone after its end."""
MOST_CALM = 20
"""Jobs in a row that no fault strikes, as where a trace has a gap."""
LEAST_LOOKS = 24
"""A process must be seen so often before its growth says something."""


class Limits(NamedTuple):
    """When it is enough."""

    num_faults: int | None
    seconds: float | None
    hang_s: float
    """A job that commits no step for so long hangs."""


class Chaos:
    """Runs a job as often as it takes for all faults to strike."""

    def __init__(
        self, job: JobConfig, folder: Path, limits: Limits, say: Callable[[str], None]
    ) -> None:
        """`folder` gets a directory for each job; faults of the job's own are left out."""
        self._job = msgspec.structs.replace(job, inject=())
        self._folder = folder
        self._limits = limits
        self._say = say
        self._began_s = time.monotonic()
        self._num_faults = 0
        self.seconds = 0.0
        """How long faults were brought about."""

    async def run(self, strikes: Iterator[Strike]) -> list[RunScore]:
        """The score of each job. UserError where the job does not run without faults."""
        reference = await self.reference()
        scores: list[RunScore] = []
        self._began_s = time.monotonic()
        while not self.is_enough:
            played = Played(self._job, self._folder / f"job{len(scores)}")
            code = await played.play(strikes, self)
            score = played.score(len(scores), code, reference)
            scores.append(score)
            self._say(
                f"job {score.number}: {score.num_faults} faults, {score.num_incidents} incidents, "
                f"{score.num_steps} steps, exit code {code} ({score.ended.splitlines()[0][:90]})"
                + "".join(f"\n  VIOLATION: {each}" for each in score.violations)
            )
            if num_calm(scores) in (len(scores), MOST_CALM) and not self.is_enough:
                raise UserError("no fault strikes before the job is over: make it longer")
        self.seconds = time.monotonic() - self._began_s
        return scores

    async def reference(self) -> Reference:
        """The job without faults. UserError where it does not run."""
        played = await self._calm(self._job, "reference")
        self._say(f"without faults: {len(played.rows('metrics'))} steps")
        reordered = None
        if self._job.parallel.tp > 1 or self._job.compute.numerics != "bitwise":
            compute = msgspec.structs.replace(self._job.compute, numerics="fast")
            other = await self._calm(msgspec.structs.replace(self._job, compute=compute), "fast")
            reordered = other.rows("metrics")
        return reference_of(played.rows("metrics"), played.rows("ledger"), reordered)

    async def _calm(self, job: JobConfig, name: str) -> Played:
        """A run without faults."""
        played = Played(job, self._folder / name)
        code = await played.play(iter(()), self)
        if code != 0:
            console = played.folder / "console"
            raise UserError(f"the job ends with {code} without any fault: see {console}")
        return played

    @property
    def is_enough(self) -> bool:
        """Whether all faults have struck that were asked for."""
        limits = self._limits
        if limits.num_faults is not None and self._num_faults >= limits.num_faults:
            return True
        elapsed_s = time.monotonic() - self._began_s
        return limits.seconds is not None and elapsed_s >= limits.seconds

    @property
    def hang_s(self) -> float:
        """See `Limits`."""
        return self._limits.hang_s

    def struck(self) -> None:
        """A fault is on its way."""
        self._num_faults += 1


class Played:
    """One job, with the faults that it says itself, and others."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        self.folder = folder
        self._job = job
        self._faults = Counter[str]()
        self._history: dict[int, list[Usage]] = {}
        self._entry = f"{TAG}={secrets.token_hex(8)}"
        self._ended = ""
        self._ended_s = 0.0
        self._left: list[str] = []

    async def play(self, strikes: Iterator[Strike], chaos: Chaos) -> int:
        """Run the job to its end under `strikes`; its exit code."""
        self.folder.mkdir()
        section = msgspec.structs.replace(self._job.job, runs_dir=str(self.folder / "runs"))
        path = self.folder / "job.toml"
        path.write_text(resolved(msgspec.structs.replace(self._job, job=section)))
        name, _, value = self._entry.partition("=")
        with (self.folder / "console").open("wb") as console:
            child = Child(
                [sys.executable, "-m", "resihp", "train", str(path)],
                env={**os.environ, name: value},
                output=console,
                own_group=True,
            )
        await self._until_running(child)
        await self._strike(child, strikes, chaos)
        code = await child.wait()
        self._ended_s = time.monotonic()
        await self._clean_up()
        return code

    async def _until_running(self, child: Child) -> None:
        end_s = time.monotonic() + START_S
        while child.running and time.monotonic() < end_s:
            if any(row["event"] == "running" for row in self.rows("events")):
                return
            await asyncio.sleep(LOOK_S)

    async def _strike(self, child: Child, strikes: Iterator[Strike], chaos: Chaos) -> None:
        """Bring faults about while the job runs; end one that hangs."""
        coming = None if chaos.is_enough else next(strikes, None)
        due_s = time.monotonic() + (coming.after_s if coming else 0.0)
        looked_s, progress, progress_s = 0.0, -1, time.monotonic()
        while child.running:
            now_s = time.monotonic()
            if now_s - looked_s >= LOOK_S:
                looked_s = now_s
                self._look()
                if (size := self._size("metrics")) != progress:
                    progress, progress_s = size, now_s
            if now_s - progress_s > chaos.hang_s:
                self._ended = f"no step for {chaos.hang_s:.0f} s"
                await child.end(0)
                return
            if coming is not None and now_s >= due_s:
                if await self._inject(coming):
                    chaos.struck()
                coming = None if chaos.is_enough else next(strikes, None)
                due_s = time.monotonic() + (coming.after_s if coming else 0.0)
            wait_s = LOOK_S if coming is None else min(LOOK_S, max(0.0, due_s - now_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), max(wait_s, 0.01))

    async def _inject(self, strike: Strike) -> bool:
        """Whether the fault is on its way: to its rank, or to the next one that is alive."""
        world = self._job.parallel.world
        fault: dict[str, str | int | float] = {"kind": strike.kind}
        if strike.lasts_s is not None:
            fault["lasts_s"] = strike.lasts_s
        for offset in range(world):
            try:
                await inject_fault(self._dir(), (strike.rank + offset) % world, fault)
            except UserError:
                continue  # not alive, or the job ends
            self._faults[strike.kind] += 1
            return True
        return False

    async def _clean_up(self) -> None:
        end_s = time.monotonic() + GONE_S
        while (left := tagged(self._entry)) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        run = self._dir().name
        self._left = [f"process {pid}" for pid in sorted(left)]
        self._left += [f"/dev/shm/{name}" for name in sorted(shared_memory(run))]

    def _look(self) -> None:
        """Processes that were there when the job began to run: later ones grow as they start."""
        pids = self._history or tagged(self._entry)
        for pid, usage in usage_of(pids).items():
            self._history.setdefault(pid, []).append(usage)

    # --- what it left

    def _dir(self) -> Path:
        return next(iter((self.folder / "runs").glob("*")), self.folder)

    def _size(self, name: str) -> int:
        path = self._dir() / f"{name}.jsonl"
        return path.stat().st_size if path.exists() else -1

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of the run."""
        path = self._dir() / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def score(self, number: int, exit_code: int, reference: Reference) -> RunScore:
        """How it went, beside a run without faults."""
        growth: Growth = growth_of(self._history, least=LEAST_LOOKS)
        return judged(
            number,
            events=self.rows("events"),
            metrics=self.rows("metrics"),
            ledger=self.rows("ledger"),
            reference=reference,
            exit_code=exit_code,
            faults=self._faults,
            growth=growth._asdict(),
            left_behind=self._left,
            ended_s=self._ended_s,
            ended=self._ended,
        )
