"""Fault traces: read with limits, played faster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resihp.chaos.trace import TraceEvent, mean_distance_s, read_trace, strikes_of
from resihp.config import FAULT_KINDS
from resihp.errors import UserError

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "infinitehbd_trace" / "fault_trace.json"


def event(day: float, node: str, kind: str = "GPU", *, is_start: bool = True) -> dict[str, object]:
    return {
        "node_id": node,
        "event_time": day,
        "event_type": "fault_start" if is_start else "fault_end",
        "fault_type": {"Level": "Hardware Failure", "Class": kind, "Desc": "lost"},
    }


def events_of(*rows: dict[str, object]) -> list[TraceEvent]:
    return msgspec.convert(list(rows), list[TraceEvent])


def test_a_trace_is_played_faster_in_its_order():
    """[T32] Distances are divided; nodes become ranks in the order in which they fail."""
    events = events_of(
        event(2.0, "b"),
        event(1.0, "a"),
        event(1.5, "a", is_start=False),
        event(4.0, "a", "NIC"),
    )
    strikes = list(strikes_of(events, 8, 86400.0, FAULT_KINDS))
    assert [(s.after_s, s.rank, s.kind) for s in strikes] == [
        (0.0, 0, "kill"),
        (1.0, 1, "kill"),
        (2.0, 0, "slow_link"),
    ]
    assert mean_distance_s(events) == 1.5 * 86400


def test_kinds_that_are_not_wanted_become_kills():
    """No fault of the trace is left out."""
    events = events_of(event(1.0, "a", "NIC"), event(2.0, "a", "Fan"))
    assert [s.kind for s in strikes_of(events, 8, 1e6, ["kill", "slow"])] == ["kill", "slow"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"node_id": 1}]', "[]", "[" * 100_000, '"\ud800"']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str):
    """In one sentence that names the file."""
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(UserError, match=r"trace\.json"):
        read_trace(path)


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public trace is not here")
def test_the_public_trace_has_its_faults():
    """584 faults of 400 servers."""
    strikes = list(strikes_of(read_trace(PUBLIC), 8, 1.0, FAULT_KINDS))
    assert len(strikes) == 584
