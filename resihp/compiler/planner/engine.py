"""A greedy player of pipelines: whoever is free takes the most urgent work that is there.

Events are played in time order. A worker, one TP group, prefers B to F to W and lower numbers to
higher ones; F needs room in memory and under the in-flight bound. Replicas whose rows are equal
are played once as a **class**; a member leaves its class, with a copy of its state, when a foreign
micro-batch comes to it or one of its own goes away. The work is so in proportion to what failed
and what helps, not to the number of replicas.

The two loops over everything that ends, and that starts, at a moment are where planning spends
its time: they call nothing for what happens inside a team.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from resihp.compiler.planner.calendar import Calendar, Crossing
from resihp.compiler.planner.patience import choice
from resihp.compiler.planner.planned import GREEDY, Item, Order, Placing, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.workers import IDLE, Team, Worker
from resihp.ir.model import Op

__all__ = ["Engine", "Migrate"]

_F, _B, _W, _BW = map(int, (Op.F, Op.B, Op.W, Op.BW))
_NEVER = 1 << 62


class Engine:
    """Plays `problem` once.

    A micro-batch is a code: its number, and below that in `_shift` bits its home; all of them set
    mean the team's own. So lower numbers sort first, and foreign ones first among equals: they
    belong to a replica that is behind.
    """

    def __init__(
        self,
        problem: Problem,
        placing: Placing,
        migrate: Migrate | None = None,
        style: Style = GREEDY,
    ) -> None:
        """`placing` is fixed beforehand; `migrate(engine, stage)` may move more as it goes.

        It is called after forwards that end at a stage.
        """
        self.problem = problem
        self.now = 0
        self.migrate = migrate
        self.style = style
        self._whims = random.Random(style.seed) if style.whim else None
        self.placing: dict[Item, dict[int, int]] = {
            item: dict(stages) for item, stages in placing.items()
        }
        self.teams: list[Team] = []
        """All of them, each once."""
        self.reloaded = set(range(problem.num_stages))
        """Stages with loads that have changed; whoever has looked at one may take it out."""
        self.num_started = 0
        """Chunks of work that were played."""
        self._team_of: dict[int, Team] = {}
        self._calendar = Calendar()
        self._touched: list[Worker] = []
        """Workers that may start something now."""
        self._constants = (
            self._calendar.ends,
            self._calendar.times,
            _B if problem.split else _BW,
            style is GREEDY,
            migrate is not None,
        )
        """What each start asks for."""
        self._forwards: set[int] = set()
        """Stages at which a forward ends now."""
        self._shift = len(problem.replicas).bit_length()
        self._own = (1 << self._shift) - 1
        self._form_teams()

    # --- setting up

    def _form_teams(self) -> None:
        apart = {home for home, _ in self.placing}
        if self.problem.num_stages == 0:
            return
        kept_of = self.problem.kept_of
        classes: dict[object, list[int]] = {}
        for replica, row in enumerate(self.problem.replicas):
            key = replica if replica in apart or None in row.chunks else row
            if replica in kept_of and key is row:
                key = row, kept_of[replica]
            classes.setdefault(key, []).append(replica)
        for members in classes.values():
            team = Team.of(members, self.problem)
            team.leave_out(kept_of.get(members[0], ()))
            self.teams.append(team)
            self._team_of.update(dict.fromkeys(members, team))
        for (home, number), stages in self.placing.items():
            for stage in stages:
                self._give(self._team_of[home].workers[stage], number)
        for team in self.teams:
            first = team.workers[0]
            first.ready_f = [
                number << self._shift | self._own
                for number in range(self.problem.num_microbatches)
                if number not in first.given
            ]
            self._touched.append(first)
        for (home, number), stages in self.placing.items():
            if 0 in stages:
                code = number << self._shift | home
                self._accept(Crossing(stages[0], 0, code, is_grad=False))
            if self.migrate is not None:
                for stage, replica in stages.items():
                    self._book(replica, stage)

    # --- playing

    def run(self) -> Planned:
        """Play until nothing moves any more."""
        planned = self.run_within(_NEVER)
        assert planned is not None, "nothing takes so long"
        return planned

    def run_within(self, limit: int) -> Planned | None:
        """The same; None once it shows that not all work can end within `limit` ticks."""
        calendar, touched = self._calendar, self._touched
        makespan = 0
        in_time = self._start_all(limit)
        while calendar.times and in_time:
            self.now = now = heappop(calendar.times)
            ended = calendar.ends.pop(now, None)
            if ended is not None:
                makespan = now
                self._end_all(ended)
            for queue, worker, code in calendar.arrivals.pop(now, ()):
                heappush(queue, code)
                touched.append(worker)
            for crossing in calendar.crossings.pop(now, ()):
                self._accept(crossing)
            if self.migrate is not None:
                for stage in sorted(self._forwards):
                    self.migrate(self, stage)
                self._forwards.clear()
            in_time = self._start_all(limit)
        return self._planned(makespan) if in_time else None

    def _end_all(self, workers: list[Worker]) -> None:
        """What is over at this moment: its memory, and where what it made goes."""
        now, touched = self.now, self._touched
        arrivals, times = self._calendar.arrivals, self._calendar.times
        forwards, follows = self._forwards, self.migrate is not None
        for worker in workers:
            code, doing = worker.code, worker.doing
            worker.doing = IDLE
            touched.append(worker)
            if doing == _F:
                worker.num_forward += 1
                if follows:
                    forwards.add(worker.stage)
                target = worker.upper
                if target is None:
                    heappush(worker.ready_b, code)
                    continue
                queue, time = target.ready_f, now + worker.edge_up
            elif doing == _W:
                worker.room += worker.needed - worker.released
                continue
            else:
                worker.room += worker.released
                worker.in_flight -= 1
                if doing == _B:
                    worker.waiting_w.append(code)
                target = worker.lower
                if target is None:
                    continue
                queue, time = target.ready_b, now + worker.edge_down
            if not worker.is_plain and self._pass_on(worker, target.stage, code):
                continue
            if target.ends_at >= time and target.doing >= 0 and not follows:
                # It looks at what is ready when it ends, and no sooner.
                heappush(queue, code)
                continue
            bucket = arrivals.get(time)
            if bucket is None:
                arrivals[time] = [(queue, target, code)]
                heappush(times, time)
            else:
                bucket.append((queue, target, code))

    def _start_all(self, limit: int) -> bool:
        """Start the most urgent work of each touched worker that is free.

        Whether all work can still end by `limit`.
        """
        now, touched = self.now, self._touched
        ends, times, op_b, greedy, follows = self._constants
        if not greedy:
            # What a patient worker does depends on its neighbours: one order for all.
            touched = sorted(dict.fromkeys(touched), key=lambda worker: worker.stage)
        started = 0
        for worker in touched:
            if worker.doing >= 0:
                continue
            if not greedy:
                doing = choice(worker, now, op_b, self.style, self._whims)
            elif worker.ready_b and not (worker.waiting_w and worker.room < worker.held):
                doing = op_b
            elif worker.ready_f and (
                (worker.in_flight < worker.bound and worker.room >= worker.needed)
                or (worker.waiting_w and worker.has_room)
            ):
                doing = _F
            elif worker.waiting_w:
                doing = _W
            else:
                continue
            if doing == _F:
                code, ticks = heappop(worker.ready_f), worker.forward
                worker.room -= worker.activation
                worker.in_flight += 1
                if follows:
                    self._note_forward(worker, code)
            elif doing == _W:
                code, ticks = worker.waiting_w.popleft(), worker.weight
            elif doing == op_b:
                code, ticks = heappop(worker.ready_b), worker.backward
                worker.room -= worker.held
            else:
                continue
            worker.doing, worker.code = doing, code
            worker.order.append(code << 2 | doing)
            worker.ends_at = time = now + ticks
            worker.left -= ticks
            started += 1
            if time + worker.left > limit:
                return False
            bucket = ends.get(time)
            if bucket is None:
                ends[time] = [worker]
                heappush(times, time)
            else:
                bucket.append(worker)
        self._touched.clear()
        self.num_started += started
        return True

    # --- between teams

    def _pass_on(self, worker: Worker, to_stage: int, code: int) -> bool:
        """Send the tensor of `code` to who runs `to_stage` of it; not if it is the team's own
        and stays."""
        replica = worker.team.members[0]
        number, rest = code >> self._shift, code & self._own
        home = replica if rest == self._own else rest
        target = self.placing.get((home, number), {}).get(to_stage, home)
        if target == home == replica:
            return False
        boundary, is_grad = min(worker.stage, to_stage), to_stage < worker.stage
        edge = self.problem.crossing[boundary]
        if target == replica:
            edge = worker.edge_down if is_grad else worker.edge_up
        sent_as = number << self._shift | (self._own if target == home else home)
        self._calendar.cross(self.now + edge, Crossing(target, to_stage, sent_as, is_grad))
        return True

    def _accept(self, crossing: Crossing) -> None:
        replica, stage, code, is_grad = crossing
        worker = self.set_apart(replica).workers[stage]
        heappush(worker.ready_b if is_grad else worker.ready_f, code)
        if not is_grad and code & self._own != self._own:
            worker.is_plain = False
            if self.migrate is None:
                self._book(replica, stage)
        self._touched.append(worker)

    def set_apart(self, replica: int) -> Team:
        """The team of `replica` alone; it leaves its class if it is in one."""
        team = self._team_of[replica]
        if len(team.members) == 1:
            return team
        twin = team.split_off(replica)
        self.teams.append(twin)
        self._team_of[replica] = twin
        self._calendar.copy_events(team, twin)
        touched = set(self._touched)
        for worker, copy in zip(team.workers, twin.workers, strict=True):
            if worker in touched:
                self._touched.append(copy)
        return twin

    def _book(self, replica: int, stage: int) -> None:
        """`replica` will run a foreign micro-batch at `stage`.

        Rules have to know at once. Else it is time when it comes: until then the replica may be
        played with others.
        """
        worker = self.set_apart(replica).workers[stage]
        worker.load += worker.cost
        worker.left += worker.cost
        worker.promised += 1
        self.reloaded.add(stage)

    def _give(self, worker: Worker, number: int) -> None:
        """Own micro-batch `number` of the worker's team of one is run by another."""
        worker.given.add(number)
        worker.load -= worker.cost
        worker.left -= worker.cost
        for neighbour in (worker.lower, worker.upper):
            if neighbour is not None:
                neighbour.is_plain = False
        self.reloaded.add(worker.stage)

    # --- what migration rules ask and do

    def _note_forward(self, worker: Worker, code: int) -> None:
        """`worker` starts the forward of a micro-batch."""
        if code & self._own == self._own:
            worker.next_own = max(worker.next_own, (code >> self._shift) + 1)
        else:
            worker.promised -= 1

    def next_pending(self, worker: Worker) -> int | None:
        """The first of the team's own micro-batches whose F has not begun and that it will run."""
        number = worker.next_own
        while number in worker.given:
            number += 1
        return number if number < self.problem.num_microbatches else None

    def move_next(self, home: int, stage: int, replica: int) -> None:
        """`replica` will run the next pending micro-batch of `home` at `stage`."""
        giver = self.set_apart(home).workers[stage]
        number = self.next_pending(giver)
        assert number is not None, f"replica {home} has nothing left to give at stage {stage}"
        self.placing.setdefault((home, number), {})[stage] = replica
        self._give(giver, number)
        self._book(replica, stage)
        extra = 0
        if giver.lower is not None:
            extra = max(0, self.problem.crossing[stage - 1] - giver.lower.edge_up)
        code = number << self._shift | self._own
        if code in giver.ready_f:
            giver.ready_f.remove(code)
            heapify(giver.ready_f)
            time = self.now
        else:
            # On its way it is sent to the taker instead; and else when it is made.
            time = self._calendar.take_back(giver, code)
        if time is not None:
            crossing = Crossing(replica, stage, number << self._shift | home, is_grad=False)
            self._calendar.cross(time + extra, crossing)

    # --- the result

    def _planned(self, makespan: int) -> Planned:
        names = _Names(self._shift)
        orders: dict[int, tuple[Order, ...]] = {}
        num_done = 0
        for team in self.teams:
            order = tuple(tuple(map(names.__getitem__, worker.order)) for worker in team.workers)
            orders.update(dict.fromkeys(team.members, order))
            num_done += len(team.members) * sum(map(len, order))
        per_chunk = 3 if self.problem.split else 2
        num_items = len(self._team_of) * self.problem.num_microbatches - len(self.problem.kept)
        wanted = num_items * self.problem.num_stages * per_chunk
        ends = tuple(
            max(team.workers[stage].ends_at for team in self.teams)
            for stage in range(self.problem.num_stages)
        )
        return Planned(makespan, orders, self.placing, complete=num_done == wanted, ends=ends)


Migrate = Callable[[Engine, int], None]
"""What may move more work at a stage while the pipelines are played."""


class _Names(dict[int, tuple[Op, int, int]]):
    """(operation, home, number) of what workers have in their orders."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.own = shift, (1 << shift) - 1

    def __missing__(self, work: int) -> tuple[Op, int, int]:
        code = work >> 2
        rest = code & self.own
        name = Op(work & 3), -1 if rest == self.own else rest, code >> self.shift
        self[work] = name
        return name
