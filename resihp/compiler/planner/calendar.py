"""What will happen when, in buckets: at most moments several workers end at once."""

from __future__ import annotations

from heapq import heappush
from typing import NamedTuple

from resihp.compiler.planner.workers import Team, Worker

__all__ = ["Arrival", "Calendar", "Crossing"]

Arrival = tuple[list[int], Worker, int]
"""A tensor of the team's own: the heap that it goes to, whose that is, the micro-batch."""


class Crossing(NamedTuple):
    """A tensor for another replica than the one that made it."""

    replica: int
    stage: int
    code: int
    is_grad: bool


class Calendar:
    """Events by time."""

    __slots__ = ("arrivals", "crossings", "ends", "times")

    def __init__(self) -> None:
        self.times: list[int] = []
        """A heap of all times at which something happens; some are in it twice."""
        self.ends: dict[int, list[Worker]] = {}
        """Whose work ends."""
        self.arrivals: dict[int, list[Arrival]] = {}
        self.crossings: dict[int, list[Crossing]] = {}

    def end(self, worker: Worker) -> None:
        """`worker` will end what it does."""
        if worker.ends_at not in self.ends:
            heappush(self.times, worker.ends_at)
        self.ends.setdefault(worker.ends_at, []).append(worker)

    def arrive(self, time: int, arrival: Arrival) -> None:
        """A tensor comes from a neighbour."""
        if time not in self.arrivals:
            heappush(self.times, time)
        self.arrivals.setdefault(time, []).append(arrival)

    def cross(self, time: int, crossing: Crossing) -> None:
        """A tensor comes from another replica, or goes to one."""
        if time not in self.crossings:
            heappush(self.times, time)
        self.crossings.setdefault(time, []).append(crossing)

    def copy_events(self, team: Team, twin: Team) -> None:
        """What awaits `team` awaits its `twin` too."""
        twins = dict(zip(team.workers, twin.workers, strict=True))
        for worker, copy in twins.items():
            if worker.doing >= 0:
                self.end(copy)
        for bucket in self.arrivals.values():
            for queue, worker, code in bucket[:]:
                if worker in twins:
                    copy = twins[worker]
                    heap = copy.ready_f if queue is worker.ready_f else copy.ready_b
                    bucket.append((heap, copy, code))

    def take_back(self, worker: Worker, code: int) -> int | None:
        """A forward is not to come to `worker` after all: when it would have come; None if not on
        its way."""
        replica = worker.team.members[0]
        for time, bucket in self.arrivals.items():
            for event in bucket:
                if event[0] is worker.ready_f and event[2] == code:
                    bucket.remove(event)
                    return time
        crossing = Crossing(replica, worker.stage, code, is_grad=False)
        for time, bucket in self.crossings.items():
            if crossing in bucket:
                bucket.remove(crossing)
                return time
        return None
