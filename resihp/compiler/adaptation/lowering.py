"""The best candidates become plans: lowered, simulated, planned again where memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resihp.compiler.adaptation.decision import Considered
from resihp.compiler.adaptation.emit import Checked, check
from resihp.compiler.adaptation.entries import Entry
from resihp.compiler.adaptation.fitting import SMALL, fitting
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.simulate import Simulation, simulate
from resihp.ir.model import Plan

__all__ = ["Found", "Outcome", "best_found", "may_be_faster", "simulated_s"]

_NUM_LOWERED = 3
"""Candidates that are lowered at most before others are planned."""
_WORTH_A_LOOK = 0.02
"""Share of an iteration that a larger plan may save for it to be lowered too."""


class Outcome(NamedTuple):
    """A verified plan and its simulated time."""

    name: str
    checked: Checked
    iteration_s: float


class Found(NamedTuple):
    """A plan that fits, of a candidate of this name."""

    name: str
    simulation: Simulation

    @property
    def iteration_s(self) -> float:
        """Simulated."""
        return self.simulation.iteration_s

    def outcome(self, situation: Situation) -> Outcome:
        """The same, verified."""
        return Outcome(self.name, check(situation, self.simulation.plan), self.iteration_s)

    def considered(self, situation: Situation) -> Considered:
        """What a decision tells of a plan that is of none of its own candidates."""
        before = {group.name: group for group in situation.previous.groups}
        after = {group.name: group for group in self.simulation.plan.groups}
        changed = [name for name in before.keys() | after if before.get(name) != after.get(name)]
        return Considered(
            name=self.name,
            num_groups_changed=len(changed),
            iteration_s=self.iteration_s,
            why="",
        )


def best_found(
    situation: Situation, entries: Sequence[Entry], reached_s: float
) -> tuple[Found | None, float]:
    """The best plan of the first entries that takes less than `reached_s`, and what is reached.

    `entries` are in the order of what the planner predicts. Each is lowered only if it may be
    faster than those before it have turned out to be.
    """
    best: Found | None = None
    num_lowered = 0
    for entry in entries:
        if num_lowered == _NUM_LOWERED:
            break
        if not may_be_faster(entry, reached_s):
            continue
        twin = _twin(entry, entries)
        entry.is_lowered = True
        if twin is not None:
            entry.iteration_s, entry.why = twin.iteration_s, twin.why
            continue
        num_lowered += 1
        entry.lowered_from = entry.planned
        simulation = fitting(situation, entry, reached_s)
        if simulation is None:
            entry.why = "needs more memory than a device has"
            continue
        entry.iteration_s = simulation.iteration_s
        if entry.iteration_s < reached_s:
            best, reached_s = Found(entry.name, simulation), entry.iteration_s
    return best, reached_s


def _twin(entry: Entry, others: Sequence[Entry]) -> Entry | None:
    """Another entry of the same layout whose plan, the same, was lowered."""
    assert entry.planned is not None
    for other in others:
        if other.lowered_from is not None:
            same = other.candidate is entry.candidate and other.problem == entry.problem
            if same and other.lowered_from.orders == entry.planned.orders:
                return other
    return None


def may_be_faster(entry: Entry, best_s: float) -> bool:
    """Whether a plan may simulate in less than `best_s` by as much as it is worth to see."""
    gain = 0.0 if num_chunks(entry.problem) <= SMALL else _WORTH_A_LOOK
    return entry.least_s < best_s * (1 - gain)


def simulated_s(situation: Situation, plan: Plan) -> float:
    """Seconds of an iteration of a verified plan."""
    return simulate(plan, situation.pricing, lengths=situation.all_lengths).iteration_s
