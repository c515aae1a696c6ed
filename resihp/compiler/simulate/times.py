"""Start and end of every instruction of a course at given prices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.compiler.simulate.course import Course
from resihp.ir.model import Level

__all__ = ["Floats", "Prices", "Times", "play"]

Floats = NDArray[np.float64]


class Prices(NamedTuple):
    """Seconds."""

    duration: Floats
    """Of each instruction, in the order of the arrays."""
    delay: Floats
    """From the send of each crossing until the tensor may be used."""


class Times(NamedTuple):
    """Seconds from the begin of the iteration, one entry per instruction."""

    start: Floats
    end: Floats


def play(course: Course, prices: Prices, late: Floats | None = None) -> Times:
    """Everything as early as it can be. O(number of instructions).

    `late` says how late each entry is, where something else than the course has decided that.
    """
    elapsed = np.zeros(course.arrays.lanes.num_instrs + 1)
    np.cumsum(prices.duration, out=elapsed[1:])
    if late is None:
        late = _lateness(course, elapsed, prices.delay)
    count = np.diff(course.position, append=len(prices.duration))
    start = np.repeat(late[: course.num_entries], count)
    # Sums of the same numbers: rounding never lets an instruction end after the next one starts.
    end = start + elapsed[1:]
    start += elapsed[:-1]
    if course.arrays.plan.level is Level.PLAN:
        _step_together(course, prices.duration, start, end)
    return Times(start, end)


def _lateness(course: Course, elapsed: Floats, delay: Floats) -> Floats:
    """What each entry adds to the running sum of the durations of all instructions before.

    That sum runs through all lanes, so that a lane begins with minus the sum of the lanes before.
    """
    nodes = course.nodes
    late = np.zeros(course.num_entries + course.num_stages)
    late[nodes.first] = -elapsed[course.arrays.lanes.start]
    lag = -elapsed[course.position]
    released = course.crossings.sent + (course.arrays.plan.level is Level.SCHEDULE)
    lag[nodes.user + 1] += elapsed[released] + delay
    _in_rounds(course, late, lag, elapsed)
    if course.walk.rest:
        _one_by_one(course, late, lag, elapsed)
    return late


def _in_rounds(course: Course, late: Floats, lag: Floats, elapsed: Floats) -> None:
    num_nodes = course.nodes.num
    source = course.source
    for passed in course.walk.rounds:
        if passed[0] >= num_nodes:
            for stage in (passed - num_nodes).tolist():
                late[course.num_entries + stage] = _met_at(course, stage, late, elapsed)
            continue
        entry = passed + 1
        arrival = late[source[entry]]
        arrival += lag[entry]
        late[entry] = np.maximum(arrival, late[passed])


def _one_by_one(course: Course, late: Floats, lag: Floats, elapsed: Floats) -> None:
    num_nodes = course.nodes.num
    known: list[float] = late.tolist()
    lags: list[float] = lag.tolist()
    source: list[int] = course.source.tolist()
    for node in course.walk.rest:
        if node >= num_nodes:
            stage = node - num_nodes
            late[: course.num_entries] = known[: course.num_entries]
            known[course.num_entries + stage] = _met_at(course, stage, late, elapsed)
            continue
        here, there = known[node], known[source[node + 1]] + lags[node + 1]
        known[node + 1] = here if here > there else there
    late[:] = known


def _met_at(course: Course, stage: int, late: Floats, elapsed: Floats) -> float:
    """When the last holder of `stage` comes to its `reduce_grads`."""
    members = course.nodes.meeting[course.meetings.stage == stage]
    return float((late[members] + elapsed[course.position[members + 1]]).max())


def _step_together(course: Course, duration: Floats, start: Floats, end: Floats) -> None:
    """`step` is the last instruction of every lane and waits for all of them."""
    last = course.arrays.lanes.start[1:] - 1
    start[last] = start[last].max()
    end[last] = start[last] + duration[last]
