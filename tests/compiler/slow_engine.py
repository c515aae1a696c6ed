"""The player of pipelines in its obvious form: one heap of events, each replica for itself.

Slow, and easy to check by eye; `resihp.compiler.planner.engine` must find the same.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from resihp.compiler.planner.planned import Placing, Planned, Style
from resihp.compiler.planner.problem import Capacity, Chunks, Problem, total
from resihp.ir.model import Op

Code = tuple[int, int]
"""A micro-batch as (number, home): in the order in which work is taken, but for a worker's own,
which come after foreign ones of the same number."""


class SlowWorker:
    def __init__(self, chunks: Chunks, memory: Capacity) -> None:
        self.chunks, self.memory = chunks, memory
        self.ready_f: list[Code] = []
        self.ready_b: list[Code] = []
        self.waiting_w: deque[Code] = deque()
        self.order: list[tuple[Op, int, int]] = []
        self.doing: Op | None = None
        self.ends_at = self.live = self.in_flight = 0
        # For the rule only.
        self.load = self.num_forward = self.next_own = self.promised = 0
        self.given: set[int] = set()


class SlowEngine:
    """`delta` None: nothing moves beyond `placing`; else Algorithm 1 and its guard."""

    def __init__(
        self,
        problem: Problem,
        placing: Placing,
        style: Style,
        delta: int | None = None,
        *,
        guarded: bool = True,
    ) -> None:
        self.problem, self.style, self.delta, self.guarded = problem, style, delta, guarded
        self.placing = {item: dict(stages) for item, stages in placing.items()}
        self.num_replicas, self.num_stages = len(problem.replicas), problem.num_stages
        self.workers: dict[tuple[int, int], SlowWorker] = {}
        for d, row in enumerate(problem.replicas):
            for s, (chunks, memory) in enumerate(zip(row.chunks, row.memory, strict=True)):
                if chunks is not None and memory is not None:
                    worker = self.workers[d, s] = SlowWorker(chunks, memory)
                    worker.load = problem.num_microbatches * total(chunks)
        self.heap: list[tuple[int, int, int, str, Code]] = []
        """(time, replica, stage, what ends or comes, micro-batch)."""
        self.touched: set[tuple[int, int]] = set()
        self.now = 0
        for (home, number), stages in self.placing.items():
            for stage, replica in stages.items():
                self.give(home, stage, number)
                self.promise(replica, stage)
        for home, number in problem.kept:
            for stage in range(self.num_stages):
                self.give(home, stage, number)
        for home in range(self.num_replicas):
            for number in range(problem.num_microbatches):
                if (home, number) in problem.kept:
                    continue
                self.come(self.runs(home, number, 0), 0, "f", (number, home), 0)

    def runs(self, home: int, number: int, stage: int) -> int:
        return self.placing.get((home, number), {}).get(stage, home)

    def give(self, home: int, stage: int, number: int) -> None:
        if (home, stage) in self.workers:
            worker = self.workers[home, stage]
            worker.given.add(number)
            worker.load -= total(worker.chunks)

    def promise(self, d: int, stage: int) -> None:
        worker = self.workers[d, stage]
        worker.load += total(worker.chunks)
        worker.promised += 1

    def come(self, d: int, stage: int, what: str, code: Code, time: int) -> None:
        heappush(self.heap, (time, d, stage, what, code))

    def urgency(self, d: int, code: Code) -> Code:
        number, home = code
        return number, self.num_replicas if home == d else home

    def run(self) -> Planned:
        makespan = 0
        while self.heap:
            self.now = self.heap[0][0]
            forwards: set[int] = set()
            while self.heap and self.heap[0][0] == self.now:
                _, d, stage, what, code = heappop(self.heap)
                self.happen(d, stage, what, code)
                if what.isupper():
                    makespan = self.now
                if what == "F":
                    forwards.add(stage)
            for stage in sorted(forwards):
                if self.delta is not None:
                    self.migrate_one(stage)
            for d, stage in sorted(self.touched, key=lambda name: name[1]):
                self.dispatch(d, stage)
            self.touched.clear()
        orders = {
            d: tuple(
                tuple(self.workers[d, s].order) if (d, s) in self.workers else ()
                for s in range(self.num_stages)
            )
            for d in range(self.num_replicas)
        }
        num_items = self.problem.num_microbatches * self.num_replicas - len(self.problem.kept)
        wanted = (3 if self.problem.split else 2) * num_items * self.num_stages
        done = sum(len(worker.order) for worker in self.workers.values())
        ends = tuple(
            max(worker.ends_at for (_, s), worker in self.workers.items() if s == stage)
            for stage in range(self.num_stages)
        )
        return Planned(makespan, orders, self.placing, complete=done == wanted, ends=ends)

    def happen(self, d: int, stage: int, what: str, code: Code) -> None:
        worker = self.workers[d, stage]
        self.touched.add((d, stage))
        if what == "f":
            heappush(worker.ready_f, self.urgency(d, code))
            return
        if what == "b":
            heappush(worker.ready_b, self.urgency(d, code))
            return
        worker.doing = None
        sizes = worker.memory
        if what == "F":
            worker.num_forward += 1
            if stage + 1 < self.num_stages:
                self.pass_on(d, stage, stage + 1, "f", code)
            else:
                heappush(worker.ready_b, self.urgency(d, code))
        elif what == "W":
            worker.live -= sizes.activation - sizes.released + sizes.held
        else:
            worker.in_flight -= 1
            worker.live -= sizes.released if what == "B" else sizes.activation + sizes.held
            if what == "B":
                worker.waiting_w.append(self.urgency(d, code))
            if stage > 0:
                self.pass_on(d, stage, stage - 1, "b", code)

    def pass_on(self, d: int, stage: int, to_stage: int, what: str, code: Code) -> None:
        target, boundary = self.runs(code[1], code[0], to_stage), min(stage, to_stage)
        inside = self.problem.replicas[d].edges[boundary]
        edge = inside if target == d else self.problem.crossing[boundary]
        self.come(target, to_stage, what, code, self.now + edge)

    def dispatch(self, d: int, stage: int) -> None:
        worker = self.workers[d, stage]
        if worker.doing is not None:
            return
        sizes, chunks = worker.memory, worker.chunks
        short = bool(worker.waiting_w) and worker.live + sizes.held > sizes.free
        can_b = bool(worker.ready_b) and not short
        can_f = bool(worker.ready_f) and self.has_room(worker, stage)
        if can_b and not (can_f and self.style.forward_first):
            code = heappop(worker.ready_b)
            worker.live += sizes.held
            if self.problem.split:
                self.start(d, stage, Op.B, code, chunks.backward_input)
            else:
                self.start(d, stage, Op.BW, code, chunks.backward_input + chunks.backward_weight)
        elif can_f:
            code = heappop(worker.ready_f)
            worker.live += sizes.activation
            worker.in_flight += 1
            if code[1] == self.num_replicas:
                worker.next_own = max(worker.next_own, code[0] + 1)
            else:
                worker.promised -= 1
            self.start(d, stage, Op.F, code, chunks.forward)
        elif worker.waiting_w:
            blocked = bool(worker.ready_b or worker.ready_f)
            if blocked or self.w_fits(d, stage, chunks.backward_weight):
                self.start(d, stage, Op.W, worker.waiting_w.popleft(), chunks.backward_weight)

    def has_room(self, worker: SlowWorker, stage: int) -> bool:
        bound, sizes = self.problem.in_flight, worker.memory
        if bound is not None and worker.in_flight >= bound[stage]:
            return False
        wanted = worker.live + sizes.activation
        owed = len(worker.waiting_w) * (sizes.activation - sizes.released + sizes.held)
        return wanted <= sizes.free and wanted - owed + sizes.held <= sizes.free

    def w_fits(self, d: int, stage: int, ticks: int) -> bool:
        coming: list[int] = []
        edges, worker = self.problem.replicas[d].edges, self.workers[d, stage]
        lower, upper = self.workers.get((d, stage - 1)), self.workers.get((d, stage + 1))
        if lower is not None and lower.doing is Op.F and self.has_room(worker, stage):
            coming.append(lower.ends_at + edges[stage - 1])
        short = bool(worker.waiting_w) and worker.live + worker.memory.held > worker.memory.free
        if upper is not None and upper.doing in (Op.B, Op.BW) and not short:
            coming.append(upper.ends_at + edges[stage])
        delay = ticks * (1 - self.style.overrun)
        return self.style.overrun >= 1 or not coming or self.now + delay <= min(coming)

    def start(self, d: int, stage: int, op: Op, code: Code, ticks: int) -> None:
        worker = self.workers[d, stage]
        number, rest = code
        is_own = rest == self.num_replicas
        worker.doing, worker.ends_at = op, self.now + ticks
        worker.order.append((op, -1 if is_own else rest, number))
        self.come(d, stage, op.name, (number, d if is_own else rest), worker.ends_at)

    def migrate_one(self, stage: int) -> None:
        rows = {d: worker for (d, s), worker in self.workers.items() if s == stage}
        fastest = max(rows, key=lambda d: (rows[d].num_forward, -d))
        taker = rows[fastest]
        size = self.problem.num_microbatches

        def pending(d: int) -> int | None:
            own = range(rows[d].next_own, size)
            return next((number for number in own if number not in rows[d].given), None)

        names = list(rows)
        if self.guarded:
            after = taker.load + total(taker.chunks)
            names = [d for d in rows if pending(d) is not None and after < rows[d].load]
        slowest = min(names, key=lambda d: (rows[d].num_forward, d), default=fastest)
        number = pending(slowest)
        ahead = taker.num_forward - rows[slowest].num_forward
        if number is None or ahead <= (self.delta or 0):
            return
        sizes, guests = taker.memory, taker.promised + 1
        bound = self.problem.in_flight
        kept = sizes.activation - sizes.released + sizes.held
        free = sizes.free - taker.live
        owed = len(taker.waiting_w) * kept
        if (
            (bound is None or taker.in_flight + guests <= bound[stage])
            and guests * sizes.activation <= free
            and guests * (sizes.activation + sizes.held) <= free + owed
        ):
            self.move(slowest, stage, fastest, number)

    def move(self, home: int, stage: int, replica: int, number: int) -> None:
        self.placing.setdefault((home, number), {})[stage] = replica
        self.give(home, stage, number)
        self.promise(replica, stage)
        giver, boundary = self.workers[home, stage], stage - 1
        extra = 0
        if stage > 0:
            inside = self.problem.replicas[home].edges[boundary]
            extra = max(0, self.problem.crossing[boundary] - inside)
        if (number, self.num_replicas) in giver.ready_f:
            giver.ready_f = sorted(set(giver.ready_f) - {(number, self.num_replicas)})
            self.come(replica, stage, "f", (number, home), self.now + extra)
        for event in self.heap:
            if event[1:] == (home, stage, "f", (number, home)):
                # On its way already: it is sent to the taker instead.
                self.heap = sorted(set(self.heap) - {event})
                self.come(replica, stage, "f", (number, home), event[0] + extra)
                return
