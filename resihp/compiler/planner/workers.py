"""Workers, one TP group each, and the teams that they form: one replica, or several alike."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence

from resihp.compiler.planner.problem import Capacity, Chunks, Problem

__all__ = ["IDLE", "Team", "Worker"]

IDLE = -1
_UNBOUNDED = 1 << 62
_NOTHING = Chunks(0, 0, 0)
_NOWHERE = Capacity(0, 0, 0, 0)


class Worker:
    """One stage of a team, and all that a play knows of it.

    A micro-batch is a code in which its number comes first: codes sort as work is to be taken.
    """

    __slots__ = (
        "activation",
        "backward",
        "bound",
        "code",
        "cost",
        "doing",
        "edge_down",
        "edge_up",
        "ends_at",
        "forward",
        "given",
        "held",
        "in_flight",
        "is_plain",
        "left",
        "load",
        "lower",
        "needed",
        "next_own",
        "num_forward",
        "order",
        "promised",
        "ready_b",
        "ready_f",
        "released",
        "room",
        "stage",
        "team",
        "upper",
        "waiting_w",
        "weight",
    )

    def __init__(self, team: Team, stage: int, problem: Problem) -> None:
        row = problem.replicas[team.members[0]]
        chunks, sizes = row.chunks[stage] or _NOTHING, row.memory[stage] or _NOWHERE
        bound = _UNBOUNDED if problem.in_flight is None else problem.in_flight[stage]
        self.team = team
        self.stage = stage
        self.lower: Worker | None = None
        """The neighbour that holds the layers before."""
        self.upper: Worker | None = None
        self.edge_down = row.edges[stage - 1] if stage else 0
        """Ticks of a tensor to the lower neighbour."""
        self.edge_up = row.edges[stage] if stage + 1 < problem.num_stages else 0
        self.forward, self.backward, self.weight = chunks
        """Ticks of F, of B or BW, and of a W that stands alone."""
        if not problem.split:
            self.backward, self.weight = chunks.backward_input + chunks.backward_weight, 0
        self.cost = sum(chunks)
        """Ticks of all work on one micro-batch."""
        self.needed = sizes.activation + sizes.held
        """Bytes that must be free for an F to start: those of its B as well."""
        self.activation, self.held = sizes.activation, sizes.held
        self.released = sizes.released if problem.split else self.needed
        """Bytes that are free again after B, or BW."""
        self.room = sizes.free
        """Bytes that are free."""
        self.bound = bound if row.chunks[stage] is not None else 0
        """Most micro-batches in flight; none where the replica lacks the stage."""
        self.in_flight = 0
        self.doing = IDLE
        """The operation that runs, and below its micro-batch and its end."""
        self.code = 0
        self.ends_at = 0
        self.load = self.left = problem.num_microbatches * self.cost
        """Ticks of all work assigned, as far as it is known; and of what has not begun."""
        self.promised = 0
        """Foreign micro-batches that are known of and have not begun."""
        self.num_forward = 0
        self.given: set[int] = set()
        """Own micro-batches that others run, or nobody any more."""
        self.next_own = 0
        """Own micro-batches below this have begun their F."""
        self.is_plain = True
        """Whether everything comes from, and goes to, the neighbours in the team."""
        self.ready_f: list[int] = []
        """Heaps of what can start."""
        self.ready_b: list[int] = []
        self.waiting_w: deque[int] = deque()
        self.order: list[int] = []
        """What was started: micro-batch * 4 + operation."""

    @property
    def has_room(self) -> bool:
        """Whether one more F may run now.

        Its B must find room as well, at the latest when every W that waits has been run.
        """
        if self.in_flight >= self.bound or self.room < self.activation:
            return False
        owed = len(self.waiting_w) * (self.needed - self.released)
        return self.room + owed >= self.needed

    @property
    def has_room_for_guest(self) -> bool:
        """Whether one more foreign F may run, were all that is promised already there."""
        owed = len(self.waiting_w) * (self.needed - self.released)
        return (
            self.in_flight + self.promised < self.bound
            and self.room >= (self.promised + 1) * self.activation
            and self.room + owed >= (self.promised + 1) * self.needed
        )

    def copy_for(self, team: Team) -> Worker:
        """The same state in another team; without neighbours yet."""
        twin = Worker.__new__(Worker)
        twin.team, twin.stage, twin.lower, twin.upper = team, self.stage, None, None
        twin.edge_down, twin.edge_up = self.edge_down, self.edge_up
        twin.forward, twin.backward, twin.weight = self.forward, self.backward, self.weight
        twin.cost, twin.needed, twin.room = self.cost, self.needed, self.room
        twin.activation, twin.held, twin.released = self.activation, self.held, self.released
        twin.bound, twin.in_flight, twin.doing = self.bound, self.in_flight, self.doing
        twin.code, twin.ends_at = self.code, self.ends_at
        twin.load, twin.left, twin.num_forward = self.load, self.left, self.num_forward
        twin.promised = self.promised
        twin.given, twin.next_own = self.given.copy(), self.next_own
        twin.is_plain = self.is_plain
        twin.ready_f, twin.ready_b = self.ready_f[:], self.ready_b[:]
        twin.waiting_w, twin.order = self.waiting_w.copy(), self.order[:]
        return twin


class Team:
    """The workers of one replica, or of several that have done the same so far."""

    __slots__ = ("members", "workers")

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.workers: list[Worker] = []

    @classmethod
    def of(cls, members: list[int], problem: Problem) -> Team:
        """A team that has not begun."""
        team = cls(members)
        team._join([Worker(team, stage, problem) for stage in range(problem.num_stages)])
        return team

    def leave_out(self, numbers: Collection[int]) -> None:
        """Own micro-batches that are done already; before anything is played."""
        for worker in self.workers:
            worker.given.update(numbers)
            worker.load -= len(numbers) * worker.cost
            worker.left -= len(numbers) * worker.cost

    def split_off(self, member: int) -> Team:
        """`member` leaves, with a copy of all state."""
        self.members.remove(member)
        twin = Team([member])
        twin._join([worker.copy_for(twin) for worker in self.workers])
        return twin

    def _join(self, workers: Sequence[Worker]) -> None:
        self.workers[:] = workers
        for lower, upper in itertools.pairwise(workers):
            lower.upper, upper.lower = upper, lower
