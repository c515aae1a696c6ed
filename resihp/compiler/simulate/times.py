"""Start and end of every instruction of a course at given prices."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.compiler.simulate.course import Course
from resihp.ir.arrays import Ints
from resihp.ir.model import Level

__all__ = ["Floats", "Prices", "Times", "play"]

Floats = NDArray[np.float64]


class Prices(NamedTuple):
    """Seconds."""

    duration: Floats
    """Of each instruction, in the order of the arrays."""
    delay: Floats
    """From the send of each crossing until the tensor may be used."""


class Times:
    """Seconds from the begin of the iteration, one entry per instruction, made when asked for."""

    def __init__(self, course: Course, prices: Prices, elapsed: Floats, late: Floats) -> None:
        self._course = course
        self._prices = prices
        self._elapsed = elapsed
        self._late = late[: course.num_entries]

    @property
    def start(self) -> Floats:
        """When each instruction starts."""
        return self._both[0]

    @property
    def end(self) -> Floats:
        """When it ends. Rounding never lets one end after the next one starts."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[Floats, Floats]:
        count = np.diff(self._course.position, append=len(self._prices.duration))
        end = np.repeat(self._late, count)
        start = end + self._elapsed[:-1]
        end += self._elapsed[1:]
        if self._has_step:
            start[self._last] = self._step_s
            end[self._last] = self._step_s + self._prices.duration[self._last]
        return start, end

    @cached_property
    def makespan(self) -> float:
        """When the last instruction ends."""
        if self._has_step:
            return self._step_s + float(self._prices.duration[self._last].max())
        return float((self._late_at_end + self._elapsed[self._last + 1]).max())

    @cached_property
    def _step_s(self) -> float:
        """`step` is the last instruction of every lane and waits for all of them."""
        return float((self._late_at_end + self._elapsed[self._last]).max())

    @property
    def _has_step(self) -> bool:
        return self._course.arrays.plan.level is Level.PLAN

    @property
    def _last(self) -> Ints:
        return self._course.arrays.lanes.start[1:] - 1

    @property
    def _late_at_end(self) -> Floats:
        # The entry before the begin of the next lane.
        return self._late[self._course.nodes.first[1:] - 1]


def play(course: Course, prices: Prices, late: Floats | None = None) -> Times:
    """Everything as early as it can be. O(number of instructions).

    `late` says how late each entry is, where something else than the course has decided that.
    """
    elapsed = np.zeros(course.arrays.lanes.num_instrs + 1)
    np.cumsum(prices.duration, out=elapsed[1:])
    if late is None:
        late = _lateness(course, elapsed, prices.delay)
    return Times(course, prices, elapsed, late)


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
