"""Where a plan lacks memory: the same work in other orders that need less, the fastest that fits.

The planner counts activations. What the verifier counts beside them are buffers and, in fp32, sums
of gradients that wait for each other, of which there are the more the less the numbers of moved
micro-batches follow each other. So plans are made again with moved micro-batches in runs, and with
less left to activations. The search goes on as long as what fits is much longer than what was
planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from resihp.compiler.adaptation.emit import lacking_bytes, lowered
from resihp.compiler.adaptation.entries import Entry
from resihp.compiler.adaptation.planning import plan_well
from resihp.compiler.adaptation.problems import TICK_S
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import GREEDY, Item, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.runs import in_runs
from resihp.compiler.simulate import Simulation, simulate
from resihp.ir.model import GroupName

__all__ = ["SMALL", "fitting"]

SMALL = 3_000
"""Chunks of work of a plan that takes no time worth mentioning."""
_NUM_RETRIES = 4
"""How often a plan that lacks memory is made again with less."""
_NEAR = 1.02
"""Times as long as planned is near enough."""
_STYLES = (GREEDY, Style(overrun=0.0))
_Placing = dict[Item, dict[int, int]]
_Reserved = dict[GroupName, int]


def fitting(situation: Situation, entry: Entry, limit_s: float) -> Simulation | None:
    """The simulated plan of an entry, or what was found in its place; None where nothing fits.

    Plans that cannot take less than `limit_s` are not looked at once there is one that lacks
    memory.
    """
    planned = entry.planned
    assert planned is not None and planned.complete, "only what is complete can become a plan"
    fit = _Fit(situation, entry, limit_s)
    lacking = fit.look(planned)
    if not lacking:
        return fit.best
    goal_s = _NEAR * (entry.makespan_s or 0.0)
    for placing in fit.placings(planned):
        fit.reserve(placing, {} if placing is not None else lacking)
        if fit.best is not None and fit.best.iteration_s <= goal_s:
            break
    return fit.best


class _Fit:
    """The plans of one entry that were looked at."""

    def __init__(self, situation: Situation, entry: Entry, limit_s: float) -> None:
        self.situation = situation
        self.entry = entry
        self.limit_s = limit_s
        self.best: Simulation | None = None

    def placings(self, planned: Planned) -> Iterator[_Placing | None]:
        """Who runs what: as the planner likes (None), or as in `planned` in runs."""
        in_bf16 = self.situation.previous.precision == "bf16"  # it has one sum of gradients
        if in_bf16:
            yield None
        size = self.entry.problem.num_microbatches
        lengths = [4, 2, size] if num_chunks(self.entry.problem) <= SMALL else [4]
        known: list[_Placing] = [planned.placing]
        for length in lengths:
            placing = in_runs(planned.placing, size, length)
            if placing not in known:
                known.append(placing)
                yield placing
        if not in_bf16:
            yield None

    def reserve(self, placing: _Placing | None, reserved: Mapping[GroupName, int]) -> None:
        """Leave more and more to what the planner does not count, until a plan fits; then less.

        What lacks is reserved first, which does nothing where less than a micro-batch was over,
        then shares of one on top of it.
        """
        fails: _Reserved = {}
        tried = dict(reserved)
        for attempt in range(_NUM_RETRIES):
            lacking = self._lacking(placing, tried)
            if lacking is None:
                return
            if not lacking:
                self._less(placing, fails, tried)
                return
            fails = tried
            tried = {
                name: fails.get(name, 0) + self._step(name, attempt, lacking.get(name, 0))
                for name in {**fails, **lacking}
            }

    def _less(self, placing: _Placing | None, fails: _Reserved, fits: _Reserved) -> None:
        """Between what was too little and what was enough."""
        if not fits or num_chunks(self.entry.problem) > SMALL:
            return
        between = {name: (fails.get(name, 0) + size) // 2 for name, size in fits.items()}
        self._lacking(placing, between)

    def _step(self, name: GroupName, attempt: int, lacking: int) -> int:
        sizes = self.entry.problem.replicas[name.replica].memory[name.pp]
        assert sizes is not None
        share = attempt * (sizes.activation + sizes.held) // (_NUM_RETRIES - 1)
        return lacking + share if lacking else 0

    def _lacking(self, placing: _Placing | None, reserved: _Reserved) -> _Reserved | None:
        """What a plan with `reserved` lacks; None where there is none that is worth a look."""
        problem = _with_less(self.entry.problem, reserved)
        if placing is None:
            profile, moves = self.situation.profile, self.entry.moves
            planned, _ = plan_well(problem, profile, move=moves, budget=0)
        else:
            planned = _best_play(problem, placing)
        if not planned.complete:
            return None
        shortest_s = planned.makespan * TICK_S + self.entry.ends.least_s
        best_s = self.limit_s if self.best is None else self.best.iteration_s
        return None if shortest_s >= best_s else self.look(planned)

    def look(self, planned: Planned) -> _Reserved:
        """Lower and simulate a plan, and keep it if it is the best; what it lacks."""
        situation = self.situation
        plan = lowered(situation, self.entry.candidate.layout, streams_of(planned))
        simulation = simulate(plan, situation.pricing, lengths=situation.all_lengths)
        lacking = lacking_bytes(simulation)
        if not lacking and (self.best is None or simulation.iteration_s < self.best.iteration_s):
            self.best = simulation
            self.entry.planned = planned
        return lacking


def _best_play(problem: Problem, placing: _Placing) -> Planned:
    """The shortest of some plays of a placing."""
    bounds = dict.fromkeys((problem.in_flight, None))
    plays = (
        Engine(problem._replace(in_flight=bound), placing, style=style).run()
        for bound, style in product(bounds, _STYLES)
    )
    return min(plays, key=lambda planned: (not planned.complete, planned.makespan))


def _with_less(problem: Problem, reserved: Mapping[GroupName, int]) -> Problem:
    """`problem` with `reserved` bytes less at some places."""
    rows = list(problem.replicas)
    for (replica, stage), num_bytes in reserved.items():
        memory = list(rows[replica].memory)
        sizes = memory[stage]
        assert sizes is not None
        memory[stage] = sizes._replace(free=sizes.free - num_bytes)
        rows[replica] = rows[replica]._replace(memory=tuple(memory))
    return problem._replace(replicas=tuple(rows))
