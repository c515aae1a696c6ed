"""What earlier coordinators of a run left in its directory, for the one that takes over.

A coordinator may have died between two rows that belong together, or inside one. So a row
without its end is cut off, and a step counts once both its rows are there. Rows that are damaged
are passed over: they are no reason not to take over.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from resihp.monitor.memory import Memory, memory_of
from resihp.monitor.row_file import cut_rows, tail
from resihp.wire.messages import StepRecord
from resihp.wire.quorum import Entry

__all__ = ["NUM_STEPS_WITH_SAMPLES", "Past", "read_past"]

NUM_STEPS_WITH_SAMPLES = 64
"""Of how many steps at the end the samples are read: more than any job goes back by."""

_T = TypeVar("_T")


class Past(NamedTuple):
    """Of one run."""

    records: list[StepRecord]
    """Of the committed steps, from the first one on; empty ones where nobody wrote. Only the last
    ones have samples."""
    generations: list[int]
    """Which one made each of them; 0: nobody wrote."""
    memory: Memory

    def before(self, entry: Entry) -> list[StepRecord]:
        """The steps that are history where `entry` is the newest decision.

        What its generation took back may be here still: another node may have written that.
        """
        return [
            record
            for record, generation in zip(self.records, self.generations, strict=True)
            if generation >= entry.generation or record.step < entry.commit.version
        ]


class _Metrics(msgspec.Struct):
    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    skipped: bool
    tokens_per_s: float
    iteration_s: float
    generation: int
    emulated: bool = False


class _Samples(msgspec.Struct):
    step: int
    samples: tuple[int, ...]


def read_past(run_dir: Path) -> Past:
    """Of the run at `run_dir`; its files are cut to what counts.

    Of the samples only those of the last steps are read: what was used before is in the ledger,
    and nobody asks for it while the job runs.
    """
    metrics, ledger = run_dir / "metrics.jsonl", run_dir / "ledger.jsonl"
    rows = _decoded(tail(ledger, NUM_STEPS_WITH_SAMPLES)[1], _Samples)
    samples = {row.step: row.samples for row in rows}
    last = max(samples, default=-1)
    cut_rows(ledger, last + 1)
    cut_rows(metrics, last + 1)
    records: list[StepRecord] = []
    generations: list[int] = []
    for row in _decoded(_whole_rows(metrics), _Metrics):
        records += [StepRecord.empty(number) for number in range(len(records), row.step)]
        if row.step == len(records):
            records.append(_record(row, samples.get(row.step, ())))
            generations += [0] * (row.step - len(generations)) + [row.generation]
    if len(records) <= last:
        cut_rows(ledger, len(records))
    memory = memory_of(_whole_rows(run_dir / "events.jsonl"), len(records))
    return Past(records, generations, memory)


def _decoded(rows: list[bytes], kind: type[_T]) -> list[_T]:
    """Rows that say what they should; a machine that died may have left others."""
    decoder = msgspec.json.Decoder(kind, strict=False)
    found: list[_T] = []
    for row in rows:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(decoder.decode(row))
    return found


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


def _whole_rows(path: Path) -> list[bytes]:
    """The rows of a file, which is cut after the last one that has its end."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        os.truncate(path, end)
    return content[:end].split(b"\n")[:-1]
