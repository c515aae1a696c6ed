"""The best plan of a problem by constraint programming (OR-Tools' CP-SAT), or how good it can be.

Who runs which stage of which micro-batch is a choice; each chunk is an interval that exists on the
worker that was chosen. Workers do one thing at a time and their memory is a cumulative resource.
A micro-batch's home has no part in its costs, so all are interchangeable: they are numbered as
they begin, which leaves one of the many equal orders to look at.
"""

from __future__ import annotations

from typing import NamedTuple

from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]

from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.problem import Chunks, Problem


class Optimum(NamedTuple):
    """What the solver knows when it ends."""

    makespan: int
    """The best that is known: the solver's or the one that it was given."""
    bound: int
    """No plan is shorter."""

    @property
    def is_proven(self) -> bool:
        """Whether there is nothing better."""
        return self.makespan == self.bound


def optimum(problem: Problem, known: int, limit_s: float, seed: int = 0) -> Optimum:
    """Looks for a plan shorter than the `known` makespan for about `limit_s` of one core.

    The limit is one of work, so that the answer is the same on every machine that is not very slow.
    """
    floor = lower_bound(problem)
    assert floor <= known, "a plan that is shorter than any can be"
    if floor == known:
        return Optimum(known, known)
    built = _Model(problem, known - 1, floor)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit_s
    solver.parameters.max_time_in_seconds = 8 * limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(built.model)
    if status == cp_model.INFEASIBLE:
        return Optimum(known, known)
    bound = max(floor, round(solver.best_objective_bound))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(round(solver.objective_value), bound)
    return Optimum(known, min(known, bound))


class _Model:
    """Variables and constraints, made once."""

    def __init__(self, problem: Problem, horizon: int, floor: int) -> None:
        self.model = cp_model.CpModel()
        self.problem = problem
        self.horizon = horizon
        self.items = range(len(problem.replicas) * problem.num_microbatches)
        self.makespan = self.model.new_int_var(floor, horizon, "makespan")
        self.runs: dict[tuple[int, int, int], cp_model.IntVar] = {}
        """Whether a replica runs a stage of a micro-batch: (micro-batch, stage, replica)."""
        self.starts: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self.ends: dict[tuple[int, int, int], cp_model.IntVar] = {}
        """(micro-batch, stage, F or B or W)."""
        self.model.minimize(self.makespan)
        for stage in range(problem.num_stages):
            self._chunks(stage)
            for replica in self._holders(stage):
                self._worker(replica, stage)
        for boundary in range(problem.num_stages - 1):
            self._transfers(boundary)
        for item in self.items[1:]:
            self.model.add(self.starts[item - 1, 0, 0] <= self.starts[item, 0, 0])

    def _holders(self, stage: int) -> list[int]:
        rows = self.problem.replicas
        return [replica for replica, row in enumerate(rows) if row.chunks[stage] is not None]

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _chunks(self, stage: int) -> None:
        """Where and when each micro-batch runs."""
        for item in self.items:
            for replica in self._holders(stage):
                self.runs[item, stage, replica] = self.model.new_bool_var("")
            self.model.add_exactly_one(
                self.runs[item, stage, replica] for replica in self._holders(stage)
            )
            for op in range(3):
                self.starts[item, stage, op] = self._time()
                self.ends[item, stage, op] = self._time()
            self.model.add(self.starts[item, stage, 1] >= self.ends[item, stage, 0])
            if self.problem.split:
                self.model.add(self.starts[item, stage, 2] >= self.ends[item, stage, 1])
            else:
                self.model.add(self.starts[item, stage, 2] == self.ends[item, stage, 1])
            self.model.add(self.makespan >= self.ends[item, stage, 2])

    def _worker(self, replica: int, stage: int) -> None:
        chunks, sizes = _row(self.problem, replica, stage)
        assert sizes is not None
        intervals: list[cp_model.IntervalVar] = []
        alive: list[tuple[cp_model.IntervalVar, int]] = []
        for item in self.items:
            runs = self.runs[item, stage, replica]
            starts = [self.starts[item, stage, op] for op in range(3)]
            ends = [self.ends[item, stage, op] for op in range(3)]
            intervals += [
                self.model.new_optional_interval_var(start, ticks, end, runs, "")
                for start, ticks, end in zip(starts, chunks, ends, strict=True)
            ]
            # What a fused backward releases is there until its end.
            until_b = ends[1] if self.problem.split else ends[2]
            for start, end, size in (
                (starts[0], until_b, sizes.released),
                (starts[0], ends[2], sizes.activation - sizes.released),
                (starts[1], ends[2], sizes.held),
            ):
                kept = self.model.new_optional_interval_var(start, self._time(), end, runs, "")
                alive.append((kept, size))
        self.model.add_no_overlap(intervals)
        if sum(size for _, size in alive) > sizes.free:
            self.model.add_cumulative(
                [kept for kept, _ in alive], [size for _, size in alive], sizes.free
            )
        load = sum(self.runs[item, stage, replica] for item in self.items) * sum(chunks)
        self.model.add(self.makespan >= load)

    def _transfers(self, boundary: int) -> None:
        """F needs the activation of the stage before, B the gradient of the stage after."""
        made = 1 if self.problem.split else 2
        for item in self.items:
            for giver in self._holders(boundary):
                for taker in self._holders(boundary + 1):
                    ticks = self.problem.crossing[boundary]
                    if giver == taker:
                        ticks = self.problem.replicas[giver].edges[boundary]
                    both = self.runs[item, boundary, giver], self.runs[item, boundary + 1, taker]
                    forward = self.ends[item, boundary, 0] + ticks
                    backward = self.ends[item, boundary + 1, made] + ticks
                    self.model.add(self.starts[item, boundary + 1, 0] >= forward).only_enforce_if(
                        both
                    )
                    self.model.add(self.starts[item, boundary, 1] >= backward).only_enforce_if(both)


def _row(problem: Problem, replica: int, stage: int):
    row = problem.replicas[replica]
    chunks = row.chunks[stage]
    assert isinstance(chunks, Chunks)
    return chunks, row.memory[stage]
