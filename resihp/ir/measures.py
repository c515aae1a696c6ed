"""Time and memory of a plan in numbers that can be compared: unit costs, peaks, bytes moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from resihp.ir.facts import Facts
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Plan
from resihp.ir.playback import play_back
from resihp.ir.reshard import ShardLoad, ShardMove, loads, transfers
from resihp.ir.verify.memory import peaks_of

__all__ = ["Measures", "Peak", "StateMove", "measure", "state_moves"]


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The group whose members need the most memory."""

    group: str
    num_bytes: int
    capacity_bytes: int


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of a plan."""

    makespan: float
    """In units of time under the plan's transport: F, B and W take one, BW two, transfers none."""
    idle: float
    """Share of the time that TP groups compute nothing, 0 .. 1, over all groups."""
    peak: Peak | None
    """None where the plan gives no capacity."""


class StateMove(msgspec.Struct, frozen=True, kw_only=True):
    """State that one rank sends to another, or reads, before the first iteration."""

    source: int | None
    """None: a saved version."""
    target: int
    num_bytes: int


def measure(plan: Plan, facts: Facts) -> Measures:
    """Time and peak memory of a verified plan."""
    lanes = lanes_of(plan)
    timeline = play_back(plan, lanes)
    makespan = timeline.makespan
    busy = sum(_busy(timeline.starts[name], timeline.ends[name]) for name in lanes)
    return Measures(
        makespan=makespan,
        idle=1 - busy / (makespan * len(lanes)) if makespan else 0.0,
        peak=_peak(plan, facts),
    )


def _busy(starts: Sequence[float], ends: Sequence[float]) -> float:
    """How long one stream computes; what overlaps counts once."""
    busy = until = 0.0
    for start, end in zip(starts, ends, strict=True):
        if end > until:
            busy += end - max(start, until)
            until = end
    return busy


def _peak(plan: Plan, facts: Facts) -> Peak | None:
    if plan.memory_bytes is None:
        return None
    lanes = lanes_of(plan)
    peaks = peaks_of(lanes, facts)
    worst = max(peaks, key=lambda name: peaks[name])
    return Peak(group=str(worst), num_bytes=peaks[worst], capacity_bytes=plan.memory_bytes)


def state_moves(
    previous: Plan, plan: Plan, bytes_of: Callable[[ShardMove | ShardLoad], int]
) -> tuple[StateMove, ...]:
    """Bytes per rank pair, by source and target, then per rank that reads a saved version.

    `plan` is verified to follow `previous`.
    """
    moved: Counter[tuple[int, int]] = Counter()
    for move in transfers(previous, plan):
        moved[move.source, move.target] += bytes_of(move)
    read: Counter[int] = Counter()
    for load in loads(previous, plan):
        read[load.target] += bytes_of(load)
    return (
        *(
            StateMove(source=source, target=target, num_bytes=num_bytes)
            for (source, target), num_bytes in sorted(moved.items())
        ),
        *(
            StateMove(source=None, target=target, num_bytes=num_bytes)
            for target, num_bytes in sorted(read.items())
        ),
    )
