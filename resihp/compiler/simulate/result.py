"""What a simulation tells: times, how busy everybody is, and bytes per link."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from resihp.compiler.facts import facts_of
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate.course import Course
from resihp.compiler.simulate.prices import Places, lane_groups
from resihp.compiler.simulate.reduction import bytes_between_members
from resihp.compiler.simulate.times import Floats, Prices, Times
from resihp.errors import UserError
from resihp.ir.arrays import Arrays, Ints
from resihp.ir.model import Group, GroupName, Instr, Level, Op, Plan
from resihp.ir.timeline import Timeline
from resihp.ir.verify.fast.memory import Kept, Usage, usage_of
from resihp.ir.verify.fast.messages import prove_channel_order

__all__ = ["GroupTime", "Peak", "Simulation"]


class GroupTime(NamedTuple):
    """How one group spends an iteration."""

    group: Group
    busy_s: float
    """In F, B, W and BW."""
    bubble_s: float
    """The rest of the iteration but for `reduce_grads` and `step`."""
    utilisation: float
    """Share of the iteration that it is busy."""


class Peak(NamedTuple):
    """The most that one member of a group needs, and where."""

    group: Group
    num_bytes: int
    position: int
    """Of the instruction in the group's stream."""
    instr: Instr | None
    """None for a group that does nothing."""
    start_s: float


class Simulation:
    """Times of one iteration. Seconds; arrays are indexed as `arrays` says.

    Of replicas that are alike in instructions and prices the arrays have one; whatever is asked
    of a group is answered for every group of the plan.
    """

    def __init__(
        self,
        course: Course,
        pricing: Pricing,
        places: Places,
        prices: Prices,
        times: Times,
        num_tokens: float,
    ) -> None:
        self.course = course
        self.num_tokens = num_tokens
        """Of all micro-batches together."""
        self.pricing = pricing
        self.places = places
        self.prices = prices
        self.times = times

    @property
    def start(self) -> Floats:
        """Of every instruction."""
        return self.times.start

    @property
    def end(self) -> Floats:
        """Of every instruction."""
        return self.times.end

    @property
    def plan(self) -> Plan:
        """What was simulated."""
        return self.course.arrays.plan

    @property
    def arrays(self) -> Arrays:
        """What `start` and `end` are indexed by."""
        return self.course.arrays

    @cached_property
    def iteration_s(self) -> float:
        """When the last instruction ends."""
        return self.times.makespan

    @property
    def compute_s(self) -> float:
        """When the last F, B, W or BW ends."""
        return float(self.end[self._is_compute].max())

    @property
    def tokens_per_s(self) -> float:
        """Of the global batch."""
        return self.num_tokens / self.iteration_s

    @cached_property
    def _op(self) -> Ints:
        return self.arrays.table.op[self.arrays.row]

    @cached_property
    def _is_compute(self) -> Ints:
        return np.flatnonzero(self._op <= Op.BW)

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds of compute of each lane."""
        return self._per_lane(self._is_compute)

    @cached_property
    def shared_s(self) -> Floats:
        """Seconds that each lane spends in `reduce_grads` and `step`."""
        return self._per_lane(np.flatnonzero((self._op == Op.REDUCE_GRADS) | (self._op == Op.STEP)))

    def _per_lane(self, at: Ints) -> Floats:
        """Seconds that the instructions `at` of each lane take."""
        weights, num_lanes = self.prices.duration[at], self.arrays.lanes.num
        return np.asarray(np.bincount(self.arrays.lane[at], weights, num_lanes), np.float64)

    def lane_of(self, name: GroupName) -> int:
        """The lane that stands for a group."""
        return self._lanes[int(self.arrays.stands_for[name.replica]), name.pp]

    @cached_property
    def _lanes(self) -> dict[tuple[int, int], int]:
        lanes = self.arrays.lanes
        places: list[list[int]] = np.stack((lanes.replica, lanes.pp), axis=1).tolist()
        return {(replica, pp): lane for lane, (replica, pp) in enumerate(places)}

    def groups(self) -> list[GroupTime]:
        """Every group of the plan that has a stream, position by position."""
        total_s, rows = self.iteration_s, list[GroupTime]()
        busy: list[float] = self.busy_s.tolist()
        shared: list[float] = self.shared_s.tolist()
        for group in self._sorted_groups():
            lane = self.lane_of(group.name)
            bubble_s = max(0.0, total_s - busy[lane] - shared[lane])
            rows.append(GroupTime(group, busy[lane], bubble_s, busy[lane] / total_s))
        return rows

    @cached_property
    def memory(self) -> Usage:
        """Bytes in use on a member of each lane's group, by the rules of the verifier.

        The sizes are those of `facts_of`. Raises UserError for sizes beyond all machines, and for
        a plan whose channels are out of order.
        """
        course = self.course
        ordered = prove_channel_order(course.messages)
        usage = None
        if ordered is not None:
            parts = course.arrays, course.held, course.work, course.tensors, ordered, course.pairs
            usage = usage_of(Kept(*parts), facts_of(self.plan))
        if usage is None:
            raise UserError("the memory of the plan cannot be told; `resihp verify` tells why")
        return usage

    def peaks(self) -> list[Peak]:
        """Of every group of the plan, position by position."""
        lanes, usage = self.arrays.lanes, self.memory
        rows: list[Peak] = []
        for group in self._sorted_groups():
            lane = self.lane_of(group.name)
            first, end = int(lanes.start[lane]), int(lanes.start[lane + 1])
            if first == end:
                rows.append(Peak(group, int(usage.state[lane]), 0, None, 0.0))
                continue
            at = first + int(usage.during[first:end].argmax())
            num_bytes = int(usage.during[at] + usage.state[lane])
            instr = self._bodies[group.name][at - first]
            rows.append(Peak(group, num_bytes, at - first, instr, float(self.start[at])))
        return rows

    def memory_over_time(self, name: GroupName) -> tuple[Floats, Ints]:
        """(seconds, bytes in use from then on) on a member of a group, ascending in time.

        What an instruction takes it has from its start on, what it gives back until its end.
        """
        lane = self.lane_of(name)
        part = slice(*self.arrays.lanes.start[lane : lane + 2].tolist())
        during = self.memory.during[part] + self.memory.state[lane]
        seconds = np.stack((self.start[part], self.end[part]), axis=1).ravel()
        after = during - self.memory.given[part]
        return seconds, np.stack((during, after), axis=1).ravel()

    @cached_property
    def _bodies(self) -> dict[GroupName, tuple[Instr, ...]]:
        return {
            GroupName(replica, stream.pp): stream.body
            for stream in self.plan.streams
            for replica in stream.replicas
        }

    def _sorted_groups(self) -> list[Group]:
        return sorted(self.plan.groups, key=lambda group: (group.pp, group.replica))

    def timeline(self) -> Timeline:
        """Start and end of every group's instructions, in seconds.

        Groups that are alike share their lists.
        """
        cuts: list[int] = self.arrays.lanes.start.tolist()
        starts: list[float] = self.start.tolist()
        ends: list[float] = self.end.tolist()
        parts = [slice(*cut) for cut in pairwise(cuts)]
        of_lane = [(starts[part], ends[part]) for part in parts]
        names = [group.name for group in self._sorted_groups()]
        chosen = {name: of_lane[self.lane_of(name)] for name in names}
        return Timeline(
            {name: start for name, (start, _) in chosen.items()},
            {name: end for name, (_, end) in chosen.items()},
            {},
        )

    def bytes_between_nodes(self) -> dict[tuple[int, int], float]:
        """Bytes of activations and gradients from node to node; inside a node under (n, n)."""
        node = self.pricing.cluster.node_of
        total: dict[tuple[int, int], float] = {}
        for (sender, receiver), num_bytes in self.bytes_between_ranks().items():
            link = node(sender), node(receiver)
            total[link] = total.get(link, 0.0) + num_bytes
        return total

    def bytes_between_ranks(self) -> dict[tuple[int, int], float]:
        """Bytes of activations and gradients from rank to rank."""
        total: dict[tuple[int, int], float] = {}
        for sender, receiver, num_bytes in self._between_groups():
            for source, target, share in bytes_between_members(sender, receiver, num_bytes):
                total[source, target] = total.get((source, target), 0.0) + share
        return total

    def _between_groups(self) -> list[tuple[Group, Group, float]]:
        """(sender, receiver, bytes on all their links together), a row for each pair and way."""
        crossings, lanes = self.course.crossings, self.arrays.lanes
        if not len(crossings.sent):
            return []
        whole = self.plan.batch.tokens * self.pricing.costs.boundary_bytes_per_token
        key = (crossings.sender * lanes.num + crossings.receiver) * 2 + crossings.is_cut
        every, how_often = np.unique(key, return_counts=True)
        kinds: list[int] = every.tolist()
        counts: list[int] = how_often.tolist()
        groups = lane_groups(self.course, self.places)
        alike: dict[int, list[int]] = {}
        stands_for: list[int] = self.arrays.stands_for.tolist()
        for replica, other in enumerate(stands_for):
            alike.setdefault(other, []).append(replica)
        rows: list[tuple[Group, Group, float]] = []
        for kind, count in zip(kinds, counts, strict=True):
            here, there = divmod(kind // 2, lanes.num)
            sender, receiver = groups[here], groups[there]
            copies = 1 if kind % 2 else self._copies(sender, receiver)
            num_bytes = float(count * whole * copies)
            members = alike[sender.replica]
            if len(members) == 1:
                rows.append((sender, receiver, num_bytes))
                continue
            # Replicas that are alike have nothing to do with others.
            rows += (
                (
                    self.places.group[sender.pp, replica],
                    self.places.group[receiver.pp, replica],
                    num_bytes,
                )
                for replica in members
            )
        return rows

    def _copies(self, sender: Group, receiver: Group) -> int:
        """How many times a tensor that is not cut crosses: each member sends it to its like."""
        if self.plan.level is Level.PLAN:
            return sender.tp
        cut = self.pricing.crossing(sender, receiver, self.plan.batch.tokens).cut
        return 1 if cut else sender.tp
