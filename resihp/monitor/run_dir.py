"""What a run leaves behind: `runs/<id>/`, with all that it was told, did and saw."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from resihp.config import JobConfig, resolved
from resihp.errors import ConfigError
from resihp.monitor.past import Past, read_past
from resihp.monitor.row_file import RowFile
from resihp.wire.console import complain, say
from resihp.wire.messages import StepRecord

__all__ = ["RunDir", "announce_run"]


def announce_run(job: JobConfig) -> RunDir:
    """Make the directory of a new run, and print where it is. ConfigError where it cannot be."""
    run_dir = RunDir.create(job)
    say(f"run directory: {run_dir.path}")
    return run_dir


class RunDir:
    """Writes the files of one run. All of them are plain text, one JSON object per line.

    A disk that refuses a write is said once on stderr, and raises nothing: rows wait for room,
    and a plan's text is not kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, RowFile] = {}
        self._is_troubled = False

    @classmethod
    def create(cls, job: JobConfig) -> RunDir:
        """A new directory under `job.runs_dir`, named by job, time and a random part."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        emulated = "emulated-" if job.device.kind == "emulated" else ""
        run_id = f"{emulated}{job.job.name}-{stamp}-{secrets.token_hex(2)}"
        try:
            made = cls.make(Path(job.job.runs_dir).absolute() / run_id)
        except OSError as error:
            raise ConfigError(f'job.runs_dir = "{job.job.runs_dir}": {error.strerror}') from error
        made.job_path.write_text(resolved(job), encoding="utf-8")
        return made

    @classmethod
    def make(cls, path: Path) -> RunDir:
        """The directory at `path`, with what of it is not there yet (on another node)."""
        for folder in ("plans", "logs", "traces", "journal"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        for name in ("events", "metrics", "ledger"):
            (path / f"{name}.jsonl").touch()
        return cls(path)

    @property
    def job_path(self) -> Path:
        """The job file as it was understood."""
        return self.path / "job.toml"

    @property
    def control_path(self) -> Path:
        """While the job runs: where an operator reaches its coordinator (0600)."""
        return self.control_of(self.path)

    @staticmethod
    def control_of(path: Path | str) -> Path:
        """The same for the run at `path`."""
        return Path(path) / "control"

    @property
    def traces_path(self) -> Path:
        """Where observed times are kept (`resihp.monitor.observations`)."""
        return self.path / "traces"

    def journal_path(self, node: int) -> Path:
        """What the monitor of `node` promised and accepted (`resihp.monitor.quorum.journal`)."""
        return self.path / "journal" / f"node{node}"

    def past(self) -> Past:
        """What the coordinators before wrote here; rows that are not whole are cut off."""
        return read_past(self.path)

    def log_path(self, rank: int) -> Path:
        """Where the executor of `rank` writes its output."""
        return self.path / "logs" / f"rank{rank}.log"

    def plan_path(self, generation: int) -> Path:
        """Where the plan of a generation is kept."""
        return self.path / "plans" / f"{generation:03d}.plan"

    def steady_plan_path(self, generation: int) -> Path:
        """Where the plan is kept, if there is one, that follows the iteration that is redone."""
        return self.path / "plans" / f"{generation:03d}.steady.plan"

    def plan(self, generation: int, text: str, cause: str, steady: str = "") -> None:
        """Keep a plan, with its cause as a comment on top, and the one that follows it."""
        reason = " ".join(cause.split())
        self._keep(self.plan_path(generation), f"# generation {generation}: {reason}\n{text}")
        if steady:
            head = f"# generation {generation}, after the iteration that is redone\n"
            self._keep(self.steady_plan_path(generation), f"{head}{steady}")

    def _keep(self, path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.troubled(f"{path}: {error.strerror}")
            path.unlink(missing_ok=True)  # half of it may be there

    def event(self, kind: str, fields: dict[str, object], at_s: float) -> None:
        """Append to `events.jsonl`. `at_s` is of the monotonic clock, `time` of the wall clock."""
        self._append("events", {"event": kind, "time": time.time(), "at_s": at_s, **fields})

    def step(self, record: StepRecord, generation: int) -> None:
        """Append a committed iteration to `metrics.jsonl` and `ledger.jsonl`."""
        self._append(
            "metrics",
            {
                "step": record.step,
                **({"emulated": True} if record.emulated else {}),
                "loss": None if record.emulated else record.loss,
                "grad_norm": None if record.emulated else record.grad_norm,
                "learning_rate": record.learning_rate,
                "skipped": record.skipped,
                "tokens_per_s": record.num_tokens / record.duration_s,
                "iteration_s": record.duration_s,
                "generation": generation,
                "snapshot": record.snapshot,
            },
        )
        self._append("ledger", {"step": record.step, "samples": record.samples})

    def take_back(self, version: int) -> None:
        """Forget the committed iterations from `version` on: they are done again."""
        for name in ("metrics", "ledger"):
            self._rows(name).take_back(version)

    def flush(self) -> None:
        """Try again to write what a full disk refused."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files; further rows are a bug."""
        for file in self._files.values():
            file.close()

    @property
    def num_missing(self) -> int:
        """Rows that the disk did not take, so far or for good."""
        return sum(file.num_dropped + file.num_waiting for file in self._files.values())

    def _append(self, name: str, row: dict[str, object]) -> None:
        self._rows(name).append(row)

    def _rows(self, name: str) -> RowFile:
        if name not in self._files:
            self._files[name] = RowFile(self.path / f"{name}.jsonl", self.troubled)
        return self._files[name]

    def troubled(self, why: str) -> None:
        """Say it once: training does not depend on it."""
        if not self._is_troubled:
            self._is_troubled = True
            line = f"resihp: warning: the run directory cannot be written: {why}; training goes on"
            complain(line)
