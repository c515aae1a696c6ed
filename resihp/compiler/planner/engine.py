"""A greedy player of pipelines: whoever is free takes the most urgent work that is there.

Events are played in time order. A worker, one TP group, prefers B to F to W and lower numbers to
higher ones; F needs room in memory and under the in-flight bound. Replicas whose rows are equal
are played once as a **class**; a member leaves its class, with a copy of its state, when a foreign
micro-batch comes to it or one of its own goes away. The work is so in proportion to what failed
and what helps, not to the number of replicas.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from resihp.compiler.planner.problem import Capacity, Chunks, Problem, total
from resihp.ir.model import Op

__all__ = ["GREEDY", "Engine", "Item", "Placing", "Planned", "Style", "Team"]

Item = tuple[int, int]
"""A micro-batch: (home replica, number there)."""
Placing = Mapping[Item, Mapping[int, int]]
"""The replica that runs a stage of a micro-batch, where that is not its home."""

_ARRIVE_F, _ARRIVE_B, _DONE_F, _DONE_B, _DONE_W, _DONE_BW = range(6)
_NEVER = 1 << 62
_OP = {_DONE_F: Op.F, _DONE_B: Op.B, _DONE_W: Op.W, _DONE_BW: Op.BW}


class Style(NamedTuple):
    """How a worker chooses where more than one thing can be done."""

    overrun: float = 1.0
    """The share of a W by which it may delay an F or B that is known to come; 1: W whenever there
    is nothing better at the moment."""
    whim: float = 0.0
    """Probability of doing the second best, to look beyond the greedy choice."""
    seed: int = 0


GREEDY = Style()


class Planned(NamedTuple):
    """What comes of one play."""

    makespan: int
    """Ticks until the last worker ends."""
    orders: dict[int, tuple[tuple[tuple[Op, int, int], ...], ...]]
    """Per replica and stage: (operation, home, number); the home is -1 for the replica's own.
    Replicas of one class share the object."""
    placing: dict[Item, dict[int, int]]
    """Who runs what is not run at home."""
    complete: bool
    """Whether everything was run; not, where memory never had room."""

    @property
    def num_moved(self) -> int:
        """Chunks (micro-batch, stage) that run away from home."""
        return sum(len(stages) for stages in self.placing.values())


class Team:
    """The workers of one replica, or of several that have done the same so far."""

    __slots__ = (
        "busy",
        "done_at",
        "finished",
        "given",
        "in_flight",
        "live",
        "load",
        "members",
        "next_own",
        "num_forward",
        "out",
        "ready_b",
        "ready_f",
        "waiting_w",
    )

    def __init__(self, members: list[int], num_stages: int) -> None:
        self.members = members
        self.busy = [-1] * num_stages
        """What each worker does: the kind of event that ends it, or -1."""
        self.done_at = [0] * num_stages
        self.live = [0] * num_stages
        self.in_flight = [0] * num_stages
        self.num_forward = [0] * num_stages
        self.finished = [0] * num_stages
        self.load = [0] * num_stages
        """Ticks of all work that is assigned to each worker, foreign work once it has come."""
        self.given: list[set[int]] = [set() for _ in range(num_stages)]
        """Own micro-batches that others run, of each stage."""
        self.next_own = [0] * num_stages
        """Own micro-batches below this have begun their F."""
        self.ready_f: list[list[int]] = [[] for _ in range(num_stages)]
        self.ready_b: list[list[int]] = [[] for _ in range(num_stages)]
        self.waiting_w: list[deque[int]] = [deque() for _ in range(num_stages)]
        self.out: list[list[tuple[Op, int]]] = [[] for _ in range(num_stages)]

    def copy_for(self, member: int) -> Team:
        """The same state for one member alone."""
        twin = Team([member], 0)
        twin.busy, twin.done_at, twin.live = self.busy[:], self.done_at[:], self.live[:]
        twin.in_flight = self.in_flight[:]
        twin.num_forward, twin.finished = self.num_forward[:], self.finished[:]
        twin.load, twin.next_own = self.load[:], self.next_own[:]
        twin.given = [set(numbers) for numbers in self.given]
        twin.ready_f = [queue[:] for queue in self.ready_f]
        twin.ready_b = [queue[:] for queue in self.ready_b]
        twin.waiting_w = [deque(queue) for queue in self.waiting_w]
        twin.out = [order[:] for order in self.out]
        return twin


class Engine:
    """Plays `problem` once.

    Inside a team a micro-batch is a code: its number for the team's own, and
    (1 + home) * M + number for a foreign one (M micro-batches per home). Own and foreign ones are
    taken in the order of their numbers, foreign ones first among equals: they belong to a replica
    that is behind.
    """

    def __init__(
        self,
        problem: Problem,
        placing: Placing,
        migrate: Callable[[Engine, int], None] | None = None,
        style: Style = GREEDY,
    ) -> None:
        """`placing` is fixed beforehand; `migrate(engine, stage)` may move more as it goes.

        It is called after each forward that ends at a stage.
        """
        self.problem = problem
        self.now = 0
        self.migrate = migrate
        self.style = style
        self._random = random.Random(style.seed) if style.whim else None
        self.placing: dict[Item, dict[int, int]] = {
            item: dict(stages) for item, stages in placing.items()
        }
        self.teams: dict[int, Team] = {}
        """By replica; members of a class share theirs."""
        self._heap: list[tuple[int, int, int, int, int, int]] = []
        self._touched: set[tuple[int, int]] = set()
        self._num_events = 0
        self._size = problem.num_microbatches
        self._form_teams()

    # --- setting up

    def _form_teams(self) -> None:
        problem = self.problem
        apart = {home for home, _ in self.placing}
        if problem.num_stages == 0:
            return
        classes: dict[object, list[int]] = {}
        for replica, row in enumerate(problem.replicas):
            lacks = any(chunks is None for chunks in row.chunks)
            key = replica if replica in apart or lacks else row
            classes.setdefault(key, []).append(replica)
        for members in classes.values():
            team = Team(members, problem.num_stages)
            for member in members:
                self.teams[member] = team
            for stage, chunks in enumerate(problem.replicas[members[0]].chunks):
                if chunks is not None:
                    team.load[stage] = self._size * total(chunks)
        for (home, number), stages in self.placing.items():
            team = self.teams[home]
            for stage in stages:
                team.given[stage].add(number)
                own = self.problem.replicas[home].chunks[stage]
                team.load[stage] -= 0 if own is None else total(own)
        for members in classes.values():
            given = self.teams[members[0]].given[0]
            for number in range(self._size):
                if number not in given:
                    self._send(members[0], 0, number, _ARRIVE_F, 0)
        for (home, number), stages in self.placing.items():
            if 0 in stages:
                self.set_apart(stages[0])
                self._send(stages[0], 0, (1 + home) * self._size + number, _ARRIVE_F, 0)

    def chunks(self, replica: int, stage: int) -> Chunks:
        """Costs at a stage that the replica has."""
        found = self.problem.replicas[replica].chunks[stage]
        assert found is not None, f"replica {replica} has no stage {stage}"
        return found

    def capacity(self, replica: int, stage: int) -> Capacity:
        """Memory at a stage that the replica has."""
        found = self.problem.replicas[replica].memory[stage]
        assert found is not None, f"replica {replica} has no stage {stage}"
        return found

    # --- playing

    def run(self) -> Planned:
        """Play until nothing moves any more."""
        heap, touched = self._heap, self._touched
        while heap:
            self.now = heap[0][0]
            forwards: set[int] = set()
            while heap and heap[0][0] == self.now:
                _, _, member, stage, kind, code = heappop(heap)
                self._play(self.teams[member], member, stage, kind, code)
                if kind == _DONE_F:
                    forwards.add(stage)
            if self.migrate is not None:
                for stage in sorted(forwards):
                    self.migrate(self, stage)
            while touched:
                member, stage = touched.pop()
                self._dispatch(self.teams[member], stage)
        return self._planned()

    def _play(self, team: Team, member: int, stage: int, kind: int, code: int) -> None:
        """One event. `member` stands for the whole team."""
        if kind == _ARRIVE_F:
            heappush(team.ready_f[stage], self._urgency(code))
            if code >= self._size:
                team.load[stage] += total(self.chunks(member, stage))
        elif kind == _ARRIVE_B:
            heappush(team.ready_b[stage], self._urgency(code))
        else:
            team.busy[stage] = -1
            team.finished[stage] = self.now
            sizes = self.capacity(member, stage)
            if kind == _DONE_F:
                team.num_forward[stage] += 1
                self._after_forward(team, member, stage, code)
            elif kind == _DONE_B:
                team.live[stage] -= sizes.released
                team.waiting_w[stage].append(code)
                self._after_backward(team, member, stage, code)
            elif kind == _DONE_BW:
                team.live[stage] -= sizes.activation + sizes.held
                self._after_backward(team, member, stage, code)
            else:
                team.live[stage] -= sizes.activation - sizes.released + sizes.held
        self._touched.add((team.members[0], stage))

    def _after_forward(self, team: Team, member: int, stage: int, code: int) -> None:
        if stage + 1 < self.problem.num_stages:
            self._pass_on(team, member, stage, stage + 1, code, _ARRIVE_F)
        else:
            heappush(team.ready_b[stage], self._urgency(code))

    def _after_backward(self, team: Team, member: int, stage: int, code: int) -> None:
        team.in_flight[stage] -= 1
        if stage > 0:
            self._pass_on(team, member, stage, stage - 1, code, _ARRIVE_B)

    def _pass_on(
        self, team: Team, member: int, stage: int, to_stage: int, code: int, kind: int
    ) -> None:
        """The tensor of `code` goes to whoever runs `to_stage` of it."""
        size, boundary = self._size, min(stage, to_stage)
        foreign = code >= size
        if len(team.members) > 1:
            edge = self.problem.replicas[member].edges[boundary]
            self._send(member, to_stage, code, kind, self.now + edge)
            return
        home, number = (code // size - 1, code % size) if foreign else (member, code)
        stages = self.placing.get((home, number))
        target = home if stages is None else stages.get(to_stage, home)
        if target == member:
            edge = self.problem.replicas[member].edges[boundary]
        else:
            edge = self.problem.crossing[boundary]
        if target != home:
            self.set_apart(target)
        sent_as = number if target == home else (1 + home) * size + number
        self._send(target, to_stage, sent_as, kind, self.now + edge)

    def _send(self, member: int, stage: int, code: int, kind: int, time: int) -> None:
        self._num_events += 1
        heappush(self._heap, (time, self._num_events, member, stage, kind, code))

    def set_apart(self, replica: int) -> Team:
        """The team of `replica` alone; it leaves its class if it is in one."""
        team = self.teams[replica]
        if len(team.members) == 1:
            return team
        twin = team.copy_for(replica)
        self.teams[replica] = twin
        first = team.members[0]
        team.members.remove(replica)
        events = [event for event in self._heap if event[2] == first]
        if replica == first:
            # The others are played under the name of their new first member.
            heir = team.members[0]
            self._heap[:] = [
                (*event[:2], heir, *event[3:]) if event[2] == first else event
                for event in self._heap
            ]
            renamed = {(heir if member == first else member, s) for member, s in self._touched}
            self._touched.clear()
            self._touched.update(renamed)
            first = heir
        for time, _, _, stage, kind, code in events:
            self._num_events += 1
            heappush(self._heap, (time, self._num_events, replica, stage, kind, code))
        self._touched.update(
            (replica, stage) for member, stage in list(self._touched) if member == first
        )
        return twin

    # --- what migration rules ask and do

    def next_pending(self, team: Team, stage: int) -> int | None:
        """The first of the team's own micro-batches whose F has not begun and that it will run."""
        number, given = team.next_own[stage], team.given[stage]
        while number in given:
            number += 1
        return number if number < self._size else None

    def move_next(self, home: int, stage: int, replica: int) -> None:
        """`replica` will run the next pending micro-batch of `home` at `stage`."""
        giver = self.set_apart(home)
        self.set_apart(replica)
        number = self.next_pending(giver, stage)
        assert number is not None, f"replica {home} has nothing left to give at stage {stage}"
        self.placing.setdefault((home, number), {})[stage] = replica
        giver.given[stage].add(number)
        giver.load[stage] -= total(self.chunks(home, stage))
        code = (1 + home) * self._size + number
        urgency = self._urgency(number)
        boundary = max(stage - 1, 0)
        extra = 0
        if stage > 0:
            inside = self.problem.replicas[home].edges[boundary]
            extra = max(0, self.problem.crossing[boundary] - inside)
        if urgency in giver.ready_f[stage]:
            giver.ready_f[stage].remove(urgency)
            heapify(giver.ready_f[stage])
            self._send(replica, stage, code, _ARRIVE_F, self.now + extra)
            return
        for index, event in enumerate(self._heap):
            if event[2:] == (home, stage, _ARRIVE_F, number):
                # On its way already: it is sent to the taker instead.
                self._heap[index] = self._heap[-1]
                self._heap.pop()
                heapify(self._heap)
                self._send(replica, stage, code, _ARRIVE_F, event[0] + extra)
                return

    def _urgency(self, code: int) -> int:
        """Sorts by number, foreign before own; gives the code back through `_code`."""
        size = self._size
        if code < size:
            return (code + 1) * (1 + len(self.problem.replicas)) - 1
        return (code % size) * (1 + len(self.problem.replicas)) + code // size - 1

    def _code(self, urgency: int) -> int:
        number, rest = divmod(urgency, 1 + len(self.problem.replicas))
        return number if rest == len(self.problem.replicas) else (1 + rest) * self._size + number

    def _dispatch(self, team: Team, stage: int) -> None:
        """Start the most urgent work of a worker, if it is free and there is any."""
        if team.busy[stage] >= 0:
            return
        member = team.members[0]
        if self.problem.replicas[member].chunks[stage] is None:
            return
        if self.style is not GREEDY:
            for choice in self._choices(team, stage):
                choice(team, member, stage)
                return
        elif team.ready_b[stage] and not (team.waiting_w[stage] and self._is_short(team, stage)):
            self._start_b(team, member, stage)
        elif team.ready_f[stage] and self.has_room(team, stage):
            self._start_f(team, member, stage)
        elif team.waiting_w[stage]:
            self._start_w(team, member, stage)

    def _is_short(self, team: Team, stage: int) -> bool:
        """Whether memory has no room for a B before a W has ended."""
        sizes = self.capacity(team.members[0], stage)
        return team.live[stage] + sizes.held > sizes.free

    def _choices(self, team: Team, stage: int) -> Iterator[Callable[[Team, int, int], None]]:
        """What the worker can start now, the most urgent first, or after a whim the second."""
        found: list[Callable[[Team, int, int], None]] = []
        if team.ready_b[stage] and not (team.waiting_w[stage] and self._is_short(team, stage)):
            found.append(self._start_b)
        blocked = bool(team.ready_b[stage]) and not found
        if team.ready_f[stage]:
            if self.has_room(team, stage):
                found.append(self._start_f)
            elif not found:
                blocked = True
        if team.waiting_w[stage] and (blocked or self._w_fits(team, stage)):
            found.append(self._start_w)
        if self._random is not None and len(found) > 1 and self._random.random() < self.style.whim:
            found.pop(0)
        return iter(found)

    def _w_fits(self, team: Team, stage: int) -> bool:
        """Whether a W delays no F or B that is on its way by more than the style allows."""
        if self.style.overrun >= 1:
            return True
        coming = _NEVER
        edges = self.problem.replicas[team.members[0]].edges
        if stage > 0 and team.busy[stage - 1] == _DONE_F:
            coming = team.done_at[stage - 1] + edges[stage - 1]
        if stage + 1 < self.problem.num_stages and team.busy[stage + 1] in (_DONE_B, _DONE_BW):
            coming = min(coming, team.done_at[stage + 1] + edges[stage])
        ticks = self.chunks(team.members[0], stage).backward_weight
        return self.now + ticks * (1 - self.style.overrun) <= coming

    def _start_b(self, team: Team, member: int, stage: int) -> None:
        chunks = self.chunks(member, stage)
        code = self._code(heappop(team.ready_b[stage]))
        team.live[stage] += self.capacity(member, stage).held
        if self.problem.split:
            self._start(team, stage, _DONE_B, code, chunks.backward_input)
        else:
            ticks = chunks.backward_input + chunks.backward_weight
            self._start(team, stage, _DONE_BW, code, ticks)

    def _start_f(self, team: Team, member: int, stage: int) -> None:
        code = self._code(heappop(team.ready_f[stage]))
        team.live[stage] += self.capacity(member, stage).activation
        team.in_flight[stage] += 1
        if code < self._size:
            team.next_own[stage] = max(team.next_own[stage], code + 1)
        self._start(team, stage, _DONE_F, code, self.chunks(member, stage).forward)

    def _start_w(self, team: Team, member: int, stage: int) -> None:
        code = team.waiting_w[stage].popleft()
        self._start(team, stage, _DONE_W, code, self.chunks(member, stage).backward_weight)

    def has_room(self, team: Team, stage: int) -> bool:
        """Whether the worker may run one more F now."""
        bound = self.problem.in_flight
        if bound is not None and team.in_flight[stage] >= bound[stage]:
            return False
        sizes = self.capacity(team.members[0], stage)
        return team.live[stage] + sizes.activation + sizes.held <= sizes.free

    def _start(self, team: Team, stage: int, kind: int, code: int, ticks: int) -> None:
        team.busy[stage], team.done_at[stage] = kind, self.now + ticks
        team.out[stage].append((_OP[kind], code))
        self._num_events += 1
        heappush(
            self._heap, (self.now + ticks, self._num_events, team.members[0], stage, kind, code)
        )

    # --- the result

    def _planned(self) -> Planned:
        distinct = {id(team): team for team in self.teams.values()}
        orders: dict[int, tuple[tuple[tuple[Op, int, int], ...], ...]] = {}
        num_done = 0
        for team in distinct.values():
            order = tuple(tuple(self._named(work) for work in out) for out in team.out)
            orders.update(dict.fromkeys(team.members, order))
            num_done += len(team.members) * sum(len(out) for out in team.out)
        per_chunk = 3 if self.problem.split else 2
        wanted = len(self.teams) * self._size * self.problem.num_stages * per_chunk
        return Planned(
            makespan=max((max(team.finished) for team in distinct.values()), default=0),
            orders=orders,
            placing=self.placing,
            complete=num_done == wanted,
        )

    def _named(self, work: tuple[Op, int]) -> tuple[Op, int, int]:
        op, code = work
        if code < self._size:
            return op, -1, code
        return op, code // self._size - 1, code % self._size
