"""Every timeout of the control plane, derived from the one knob `detect_within_s`."""

from __future__ import annotations

import msgspec

__all__ = ["HANG_CHUNKS", "Timing"]

HANG_CHUNKS = 8
"""A chunk that lasts so many times as long as the longest one usually does is called hung."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, all from `[job] detect_within_s`."""

    beat_s: float
    """Period of the looks at each process's state, of pulses, and of a node's beats."""
    report_s: float
    """Period at which an executor says how far it is, and its supervisor that it is there. A death
    is seen by its socket and a stopped process by its state, so only silence waits for this."""
    stopped_s: float
    """A process that the kernel shows as stopped this long is killed: at the third look in a row,
    also where looks are a little early or late."""
    silent_s: float
    """A supervisor that sends nothing this long is counted as lost."""
    unheard_s: float
    """A coordinator or monitor whose event loop stands still this long, while the process uses no
    processor, hangs, and is killed; one that computes may take `stalled_s`."""
    handshake_s: float
    start_s: float
    """All executors must be ready by then (importing torch takes seconds)."""
    settle_s: float
    """A survivor must leave its generation within this time, or is fenced (longer, see below)."""
    join_s: float
    """All survivors must have built groups and moved state within this time."""
    collective_s: float
    """Bound of a collective when no verdict comes; a legitimate wait for others is shorter."""
    hang_s: float
    """Nothing moved anywhere for this long, or for longer where chunks are long: whoever holds
    all others up is fenced, if that is clear."""
    stalled_s: float
    """No instruction finished anywhere for this long ends the job."""
    save_s: float
    """All parts of the version before an early end must be on disk within this time."""
    grace_s: float
    """From a polite end to SIGKILL."""
    decide_s: float
    """A quorum of nodes must have the next plan in their journals within this time."""
    lease_s: float
    """A monitor that has not heard a leader this long wants another one; the n-th node of the
    job n times as long after that."""
    fence_s: float
    """A node that has not heard a leader this long has its executors killed."""
    alone_s: float
    """A node that has not heard a leader this long ends."""
    orphan_s: float
    """A supervisor that reaches no monitor this long ends its executor and itself."""

    def settle_bound_s(self, longest_step_s: float | None) -> float:
        """How long a survivor may take to leave: it finishes the chunk that it computes first.

        No chunk is longer than a step; before the first step nobody knows how long one is.
        """
        if longest_step_s is None:
            return max(self.settle_s, self.stalled_s)
        return max(self.settle_s, 3 * longest_step_s)

    @property
    def end_bound_s(self) -> float:
        """From a signal to the end of a job that settles and saves first."""
        return 2 * self.settle_s + self.save_s + 4 * self.grace_s

    @property
    def wish_s(self) -> float:
        """From an operator's wish for a save or an audit until it is done, or given up: a recovery
        and an iteration may come before."""
        return self.stalled_s + self.save_s

    def hang_bound_s(self, longest_chunk_s: float | None) -> float:
        """How long all may stand still before one is called hung, by how long chunks take.

        How far ranks are is known as often as they report. Before the first times are known, as
        long as a job may stand still at all.
        """
        if longest_chunk_s is None:
            return self.stalled_s
        return max(self.hang_s, HANG_CHUNKS * longest_chunk_s) + self.report_s + 3 * self.beat_s

    @classmethod
    def from_detect_within(cls, detect_within_s: float) -> Timing:
        """The whole table for one value of the knob."""
        return cls(
            beat_s=detect_within_s / 5,
            report_s=detect_within_s,
            stopped_s=0.3 * detect_within_s,
            silent_s=max(5 * detect_within_s, 5.0),
            unheard_s=max(5 * detect_within_s, 5.0),
            handshake_s=max(5 * detect_within_s, 5.0),
            start_s=180.0,
            settle_s=max(10 * detect_within_s, 10.0),
            join_s=max(30 * detect_within_s, 30.0),
            collective_s=600 * detect_within_s,
            hang_s=max(10 * detect_within_s, 5.0),
            stalled_s=max(120 * detect_within_s, 120.0),
            save_s=max(60 * detect_within_s, 60.0),
            grace_s=max(2 * detect_within_s, 2.0),
            decide_s=max(20 * detect_within_s, 20.0),
            lease_s=max(2 * detect_within_s, 2.0),
            fence_s=max(20 * detect_within_s, 20.0),
            alone_s=max(120 * detect_within_s, 120.0),
            orphan_s=max(30 * detect_within_s, 30.0),
        )
