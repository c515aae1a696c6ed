"""The best candidates become plans: lowered, verified, and planned again where memory is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resihp.compiler.adaptation.emit import Checked, check, lacking_bytes, lowered
from resihp.compiler.adaptation.entries import Entry
from resihp.compiler.adaptation.planning import plan_well
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Planned
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.problem import Problem
from resihp.compiler.simulate import Simulation, simulate
from resihp.ir.model import GroupName, Plan

__all__ = ["Outcome", "best_outcome", "simulated_s"]

_NUM_LOWERED = 3
"""Candidates that are lowered at most, each only if those before do not fit or do not pay."""
_SMALL = 3_000
"""Chunks of work of a plan that takes no time worth mentioning."""
_WORTH_A_LOOK = 0.02
"""Share of an iteration that a larger plan may save for it to be lowered too."""
_NUM_RETRIES = 4
"""How often a plan that lacks memory is made again with less."""


class Outcome(NamedTuple):
    """A verified plan and its simulated time."""

    name: str
    checked: Checked
    iteration_s: float


def best_outcome(
    situation: Situation, entries: Sequence[Entry], no_change_s: float | None
) -> Outcome | None:
    """The plan of the first entry that fits and pays; None where there is none.

    `entries` are in the order of what the planner predicts.
    """
    best: tuple[Entry, Plan, float] | None = None
    goal_s = float("inf") if no_change_s is None else no_change_s
    for entry in entries[:_NUM_LOWERED]:
        if best is not None and best[2] < goal_s and not _may_be_faster(entry, best[2]):
            continue
        simulation = _fitting(situation, entry)
        if simulation is None:
            entry.does_not_fit = True
            entry.why = "needs more memory than a device has"
            continue
        entry.iteration_s = simulation.iteration_s
        if best is None or entry.iteration_s < best[2]:
            best = entry, simulation.plan, entry.iteration_s
    if best is None:
        return None
    entry, plan, iteration_s = best
    return Outcome(entry.name, check(situation, plan), iteration_s)


def _may_be_faster(entry: Entry, best_s: float) -> bool:
    """Whether a plan may simulate in less than `best_s` by as much as it is worth to see."""
    gain = 0.0 if num_chunks(entry.problem) <= _SMALL else _WORTH_A_LOOK
    return entry.least_s < best_s * (1 - gain)


def simulated_s(situation: Situation, plan: Plan) -> float:
    """Seconds of an iteration of a verified plan."""
    return simulate(plan, situation.pricing, lengths=situation.all_lengths).iteration_s


def _fitting(situation: Situation, entry: Entry) -> Simulation | None:
    """The simulated plan of an entry, planned again with less memory while it lacks some.

    What the planner counts differs from what the verifier counts in buffers and in sums of
    gradients that wait for each other; where that matters each group is left less: first by what
    it lacks, which does nothing where less than a micro-batch was over, then by shares of one.
    """
    reserved: dict[GroupName, int] = {}
    for attempt in range(_NUM_RETRIES):
        planned = entry.planned
        if planned is None or not planned.complete:
            return None
        plan = lowered(situation, entry.candidate.layout, streams_of(planned))
        simulation = simulate(plan, situation.pricing, lengths=situation.all_lengths)
        lacking = lacking_bytes(simulation)
        if not lacking:
            return simulation
        for name, num_bytes in lacking.items():
            sizes = entry.problem.replicas[name.replica].memory[name.pp]
            assert sizes is not None
            share = attempt * (sizes.activation + sizes.held) // (_NUM_RETRIES - 1)
            reserved[name] = reserved.get(name, 0) + num_bytes + share
        entry.planned = _planned_with_less(situation, entry, reserved)
    return None


def _planned_with_less(
    situation: Situation, entry: Entry, reserved: Mapping[GroupName, int]
) -> Planned:
    problem = _with_less(entry.problem, reserved)
    planned, _ = plan_well(problem, situation.profile, move=entry.moves, budget=0)
    return planned


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
