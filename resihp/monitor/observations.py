"""When every instruction of a run really began and ended: `runs/<id>/traces`, and back.

Each rank sends the times of every iteration after it. They are kept as they come, framed messages
one after the other, in segments of a few MiB; of a long run the first segment and the newest ones.
A thread writes them, so that no disk holds up the coordinator.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, NamedTuple

import msgspec

from resihp.config import load
from resihp.errors import FrameError, UserError
from resihp.ir.drawing.scene import Clock, Played
from resihp.ir.lanes import Lane, lanes_of
from resihp.ir.model import GroupName, Plan
from resihp.ir.timeline import Timeline
from resihp.monitor.run_dir import RunDir
from resihp.monitor.run_plans import plan_of_run
from resihp.wire.framing import HEADER_BYTES, frame, frame_length
from resihp.wire.messages import Observed

__all__ = ["ObservationLog", "observations", "played_run"]

SEGMENT_BYTES = 8 << 20
MAX_SEGMENTS = 8
MAX_WAITING = 1024
"""Records that are here and not written, at most."""


class Seen(msgspec.Struct, frozen=True):
    """One iteration of one rank."""

    rank: int
    observed: Observed


class ObservationLog:
    """Takes what is seen from the event loop, and writes it on a thread of its own.

    What the disk does not take in time, or at all, is dropped and counted: a picture of an
    iteration is worth no delay of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = _Writer(folder)
        self._queue: SimpleQueue[list[Seen] | None] = SimpleQueue()
        self._batch: list[Seen] = []
        self._num_handed = 0
        """To the thread."""
        self._num_done = 0
        """By the thread, written or dropped."""
        self._num_dropped = 0
        """Not handed to the thread, which was too slow."""
        self._num_refused = 0
        """By the disk."""
        self._error: OSError | None = None
        self._thread = Thread(target=self._write, name="observations", daemon=True)
        self._thread.start()

    def add(self, rank: int, observed: Observed) -> None:
        """Append the times of one iteration of `rank`, at the next `flush`."""
        if len(self._batch) + self._num_handed - self._num_done < MAX_WAITING:
            self._batch.append(Seen(rank, observed))
        else:
            self._num_dropped += 1

    def flush(self) -> None:
        """Hand the thread what came since the last time, all at once: it wakes up for each."""
        if self._batch:
            self._num_handed += len(self._batch)
            self._queue.put(self._batch)
            self._batch = []

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.flush()
        self._queue.put(None)
        self._thread.join()
        self._writer.close()

    @property
    def trouble(self) -> str:
        """Once it is closed: what was not kept, and why; empty if all was."""
        num = self._num_dropped + self._num_refused
        if not num:
            return ""
        why = "the disk was too slow" if self._error is None else str(self._error)
        return f"the times of {num} iterations of ranks were not kept: {why}"

    def _write(self) -> None:
        while (batch := self._queue.get()) is not None:
            for seen in batch:
                if self._error is None:
                    try:
                        self._writer.add(seen)
                    except OSError as error:  # `trouble` tells it
                        self._error = error
                self._num_refused += self._error is not None
                self._num_done += 1


class _Writer:
    """Writes the segments of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = -1
        self._file: IO[bytes] | None = None
        self._size = 0

    def add(self, seen: Seen) -> None:
        """Append one record."""
        record = frame(msgspec.msgpack.encode(seen))
        if self._file is None or self._size + len(record) > SEGMENT_BYTES:
            self._begin_segment()
        assert self._file is not None
        self._file.write(record)
        self._size += len(record)

    def _begin_segment(self) -> None:
        self.close()
        self._number += 1
        self._size = 0
        self._folder.mkdir(exist_ok=True)
        self._file = _segment(self._folder, self._number).open("wb", buffering=0)
        oldest = self._number - MAX_SEGMENTS + 1
        if oldest > 0:
            _segment(self._folder, oldest).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the segment that is written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _segment(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.seen"


def observations(run: Path) -> Iterator[tuple[int, Observed]]:
    """(rank, times) of all iterations that were kept, in the order of their arrival.

    A segment that ends in the middle of a message ends there: its run may still go on.
    """
    for path in sorted(RunDir(run).traces_path.glob("*.seen")):
        data = path.read_bytes()
        at = 0
        while len(data) - at > HEADER_BYTES:
            try:
                length = frame_length(data[at : at + HEADER_BYTES])
                start = at + HEADER_BYTES
                if start + length > len(data):
                    break
                seen = msgspec.msgpack.decode(data[start : start + length], type=Seen)
            except (FrameError, msgspec.DecodeError) as error:
                raise UserError(f"{path}: damaged at byte {at}: {error}") from None
            yield seen.rank, seen.observed
            at = start + length


class _Iteration(NamedTuple):
    generation: int
    step: int


def played_run(run: Path, step: int | None) -> Played:
    """The iteration `step` of a run as its ranks saw it, for a picture; None: the last whole one.

    The times of a group are those of its first member. Raises UserError for what is no run, has no
    such step, or one of which not all groups' times were kept.
    """
    if not RunDir(run).traces_path.is_dir():
        raise UserError(f"{run}: no observed times there; they are in the directory of a run")
    kept: dict[_Iteration, dict[int, Observed]] = {}
    for rank, observed in observations(run):
        kept.setdefault(_Iteration(observed.generation, observed.step), {})[rank] = observed
    for iteration in sorted(kept, key=lambda each: (each.step, each.generation), reverse=True):
        if step is not None and iteration.step != step:
            continue
        plan = plan_of_run(run, iteration.generation, iteration.step)
        if {group.ranks[0] for group in plan.groups} <= kept[iteration].keys():
            return _played(run, plan, iteration, kept[iteration])
    steps = sorted({iteration.step for iteration in kept})
    what = "a whole iteration" if step is None else f"all of step {step}"
    there = f"; kept are steps {steps[0]} to {steps[-1]}" if steps else ""
    raise UserError(f"{run}: the times of {what} are not there{there}")


def _played(run: Path, plan: Plan, iteration: _Iteration, of: dict[int, Observed]) -> Played:
    lanes = lanes_of(plan)
    times = {name: _times(lane, of[lane.group.ranks[0]]) for name, lane in lanes.items()}
    zero_ns = min((min(starts) for starts, _ in times.values() if starts), default=0)

    def seconds(moments: list[int]) -> list[float]:
        return [(moment - zero_ns) / 1e9 for moment in moments]

    starts: dict[GroupName, list[float]] = {}
    ends: dict[GroupName, list[float]] = {}
    for name, (begun, ended) in times.items():
        starts[name], ends[name] = seconds(begun), seconds(ended)
    kind = load(run / "job.toml").device.kind
    emulated = "emulated, " if kind == "emulated" else ""
    note = f"{emulated}seen in step {iteration.step} of generation {iteration.generation} on {kind}"
    replicas = sorted({group.replica for group in plan.groups})
    return Played(
        plan=plan,
        lanes=lanes,
        timeline=Timeline(starts, ends, {}),
        clock=Clock("s", note),
        kinds={replica: (replica,) for replica in replicas},
        capacity_bytes=plan.memory_bytes,
    )


def _times(lane: Lane, observed: Observed) -> tuple[list[int], list[int]]:
    """Start and end of each instruction, ns; one that did nothing took no time where it stands."""
    starts, ends = array("q", observed.starts_ns), array("q", observed.ends_ns)
    if len(starts) != len(lane.body) or len(ends) != len(lane.body):
        raise UserError(
            f"{lane.name}: the times of {len(starts)} instructions, and the plan has "
            f"{len(lane.body)}"
        )
    first = min((start for start in starts if start), default=0)
    begun: list[int] = []
    ended: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        before = ended[-1] if ended else first
        begun.append(start or before)
        ended.append(end or begun[-1])
    return begun, ended
