"""What earlier coordinators of a run left in its directory, for the one that takes over.

A coordinator may have died between two rows that belong together, or inside one. So a row
without its end is cut off, and a step counts once both its rows are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from resihp.monitor.incident import Incident
from resihp.wire.messages import StepRecord

__all__ = ["Past", "read_past"]


class Past(NamedTuple):
    """Of one run."""

    records: list[StepRecord]
    """Of the committed steps, from the first one on; empty ones where nobody wrote."""
    incidents: list[Incident]
    num_plans: int
    """Generations that ran."""
    executors: dict[int, int]
    """Process number of the executor that each rank started last."""


class _Metrics(msgspec.Struct):
    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    skipped: bool
    tokens_per_s: float
    iteration_s: float
    emulated: bool = False


class _Samples(msgspec.Struct):
    step: int
    samples: tuple[int, ...]


class _Event(msgspec.Struct):
    event: str
    at_s: float
    rank: int = -1
    pid: int = -1
    evidence: str = ""


def read_past(run_dir: Path) -> Past:
    """Of the run at `run_dir`; its files are cut to what counts."""
    metrics, ledger = run_dir / "metrics.jsonl", run_dir / "ledger.jsonl"
    rows = _whole_rows(metrics)
    samples = [msgspec.json.decode(row, type=_Samples) for row in _whole_rows(ledger)]
    steps = [msgspec.json.decode(row, type=_Metrics) for row in rows]
    if len(rows) > len(samples):
        _cut(metrics, rows[: len(samples)])
    records: list[StepRecord] = []
    for step, read in zip(steps, samples, strict=False):
        records += [StepRecord.empty(number) for number in range(len(records), step.step)]
        records.append(_record(step, read.samples))
    return Past(records, *_told(_whole_rows(run_dir / "events.jsonl"), len(records)))


def _record(row: _Metrics, samples: tuple[int, ...]) -> StepRecord:
    return StepRecord(
        step=row.step,
        loss=row.loss or 0.0,
        grad_norm=row.grad_norm or 0.0,
        learning_rate=row.learning_rate,
        skipped=row.skipped,
        num_tokens=round(row.tokens_per_s * row.iteration_s),
        samples=samples,
        duration_s=row.iteration_s,
        emulated=row.emulated,
    )


def _told(rows: list[bytes], step: int) -> tuple[list[Incident], int, dict[int, int]]:
    """Incidents, number of plans, and executors, from the events."""
    incidents: list[Incident] = []
    executors: dict[int, int] = {}
    num_plans = 0
    open_ones: list[_Event] = []
    for row in rows:
        event = msgspec.json.decode(row, type=_Event, strict=False)
        match event.event:
            case "executor_started":
                executors[event.rank] = event.pid
            case "running":
                num_plans += 1
            case "rank_lost":
                open_ones.append(event)
            case "incident":
                incidents.append(msgspec.json.decode(row, type=Incident))
                open_ones.clear()
            case _:
                pass
    if open_ones:
        incidents.append(
            Incident(
                ranks=[event.rank for event in open_ones],
                evidence="; ".join(event.evidence for event in open_ones),
                detected_s=open_ones[0].at_s,
                step=step,
            )
        )
    return incidents, num_plans, executors


def _whole_rows(path: Path) -> list[bytes]:
    """The rows of a file, which is cut after the last one that has its end."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    rows = whole.splitlines()
    if len(whole) != len(content):
        _cut(path, rows)
    return rows


def _cut(path: Path, rows: list[bytes]) -> None:
    with path.open("r+b") as file:
        file.truncate(sum(len(row) + 1 for row in rows))
