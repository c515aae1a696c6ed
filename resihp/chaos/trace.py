"""A fault trace of a cluster, played faster: InfiniteHBD's 348 days of 400 servers.

The format is a JSON list of events (github.com/stepfun-ai/InfiniteHBD-Trace, `fault_trace.json`):
`node_id`, `event_time` in days, `event_type`, `fault_type` with Level, Class and Desc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from resihp.chaos.mix import Strike
from resihp.config import FaultKind
from resihp.errors import UserError

__all__ = ["TraceEvent", "mean_distance_s", "read_trace", "strikes_of"]

MAX_BYTES = 64 << 20
DAY_S = 86400.0
LONGEST_S = 2.0
"""A fault that only slows something down lasts no longer, whatever the trace says."""


class _FaultType(msgspec.Struct, frozen=True):
    Class: str
    Desc: str


class TraceEvent(msgspec.Struct, frozen=True):
    """A line of the trace."""

    node_id: str
    event_time: float
    """Days."""
    event_type: Literal["fault_start", "fault_end"]
    fault_type: _FaultType


_KINDS: dict[str, FaultKind] = {
    "GPU": "kill",
    "Parameter Plane Cable": "slow_link",
    "NIC": "slow_link",
    "Fan": "slow",
    "Power Supply": "kill_supervisor",
    "Motherboard": "kill_supervisor",
    "System Crash": "kill_supervisor",
    "Operating System": "kill_supervisor",
    "Training Task Troubleshooting": "stop",
    "Stress Test Failure": "exception",
    "File System": "full_disk",
    "CPU": "stop",
}
"""By class of fault; everything else ends the executor."""
_LASTING = ("slow_link", "slow", "full_disk")


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a trace. UserError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: is longer than {MAX_BYTES} bytes")
    try:
        events = msgspec.json.decode(data, type=list[TraceEvent])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: is no fault trace: {error}") from error
    if sum(event.event_type == "fault_start" for event in events) < 2:
        raise UserError(f"{path}: has no two faults")
    return events


def mean_distance_s(events: Sequence[TraceEvent]) -> float:
    """Seconds between two faults, on average."""
    starts = sorted(e.event_time for e in events if e.event_type == "fault_start")
    return max((starts[-1] - starts[0]) * DAY_S / (len(starts) - 1), 1e-9)


def strikes_of(
    events: Sequence[TraceEvent], world: int, faster: float, kinds: Sequence[FaultKind]
) -> Iterator[Strike]:
    """The faults of the trace in order, `faster` times as fast.

    Nodes become ranks in the order in which they first fail, again from 0 after the last rank. A
    kind that is not among `kinds` becomes a kill.
    """
    ranks: dict[str, int] = {}
    before_s: float | None = None
    for event in sorted(events, key=lambda event: event.event_time):
        if event.event_type != "fault_start":
            continue
        rank = ranks.setdefault(event.node_id, len(ranks) % world)
        at_s = event.event_time * DAY_S / faster
        after_s = 0.0 if before_s is None else at_s - before_s
        before_s = at_s
        kind = _KINDS.get(event.fault_type.Class, "kill")
        kind = kind if kind in kinds else "kill"
        cause = f"{event.fault_type.Class}: {event.fault_type.Desc}"
        yield Strike(after_s, rank, cause, kind, LONGEST_S if kind in _LASTING else None)
