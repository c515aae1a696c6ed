"""All timeouts of a job with their meaning, and whether each leaves time for those inside it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resihp.monitor.doctor.finding import Finding, problem, well
from resihp.wire.timing import Timing

__all__ = ["MEANINGS", "ORDER", "Timeout", "check_order", "timeouts"]

TOPIC = "timeouts"
MEANINGS = {
    "beat_s": "period of the look at each process's state, and of a node's beats",
    "report_s": "period at which an executor, and its supervisor for it, says how far it is",
    "stopped_s": "a process shown as stopped (SIGSTOP) longer, so at three looks, is killed",
    "silent_s": "a supervisor that says nothing this long counts as lost",
    "unheard_s": "a coordinator or monitor that hangs this long, and computes nothing, is killed",
    "handshake_s": "for a stranger to prove itself; and for unacknowledged data on a connection",
    "start_s": "until all executors are ready, from their start",
    "settle_s": "until a survivor has left its generation; three steps where those are longer",
    "join_s": "until all have groups and state of a new generation",
    "collective_s": "of a collective that nobody ends earlier",
    "hang_s": "nothing moved for this long (or for some chunks): who holds all up is killed",
    "stalled_s": "no instruction finished anywhere for this long, and the job ends",
    "save_s": "the save before an early end is given up after this time",
    "grace_s": "from a polite end to SIGKILL",
    "decide_s": "until a quorum of nodes has the next plan on disk, else the job ends",
    "lease_s": "without a coordinator, until a node starts one; later nodes a multiple of it",
    "fence_s": "without a coordinator, until a node kills its executors",
    "alone_s": "without a coordinator, until a node gives the job up",
    "orphan_s": "without a monitor, until a supervisor gives up its rank",
}
ORDER = (
    ("beat_s", "stopped_s", "a stopped process is looked at twice"),
    ("beat_s", "lease_s", "a lost beat or two is no lost coordinator"),
    ("beat_s", "unheard_s", "a process is looked at more than once before it hangs"),
    ("unheard_s", "fence_s", "a hung coordinator is replaced before executors are killed"),
    ("beat_s", "report_s", "the state of a process is known before it says anything"),
    ("report_s", "silent_s", "a lost beat or two is no lost supervisor"),
    ("report_s", "hang_s", "a rank that gets on says so in time"),
    ("stopped_s", "silent_s", "a stopped process is seen before it counts as silent"),
    ("lease_s", "decide_s", "nodes are asked more than once to write a plan down"),
    ("lease_s", "fence_s", "a new coordinator comes before executors are killed"),
    ("handshake_s", "join_s", "a peer is asked more than once while groups are built"),
    ("settle_s", "join_s", "whoever left last still joins in time"),
    ("stopped_s", "hang_s", "a stopped process is no riddle"),
    ("hang_s", "stalled_s", "who holds all up is looked for before the job ends"),
    ("join_s", "stalled_s", "building groups is no stalled job"),
    ("fence_s", "alone_s", "a minority is fenced before it gives up"),
    ("beat_s", "grace_s", "an order to end arrives before SIGKILL"),
    ("lease_s", "orphan_s", "a monitor is restarted before a supervisor gives up"),
)
"""(shorter, longer, what the difference is for)."""


class Timeout(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    name: str
    seconds: float
    meaning: str


def timeouts(detect_within_s: float) -> list[Timeout]:
    """The whole table for one value of the knob."""
    timing = Timing.from_detect_within(detect_within_s)
    return [
        Timeout(name=name, seconds=round(getattr(timing, name), 6), meaning=MEANINGS[name])
        for name in Timing.__struct_fields__
    ]


def check_order(detect_within_s: float) -> Iterator[Finding]:
    """Whether every timeout leaves time for what must come before it."""
    timing = Timing.from_detect_within(detect_within_s)
    bad = [
        f"{shorter} = {getattr(timing, shorter):g} s must be below {longer} = "
        f"{getattr(timing, longer):g} s: {why}"
        for shorter, longer, why in ORDER
        if not getattr(timing, shorter) < getattr(timing, longer)
    ]
    yield from (problem(TOPIC, text) for text in bad)
    if not bad:
        yield well(TOPIC, f"all derived from detect_within_s = {detect_within_s:g}, in order")
