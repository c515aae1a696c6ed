"""Plans prepared once and played at any lengths of documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.compiler.costs import Lengths
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate.contention import contend, loads_of
from resihp.compiler.simulate.course import Course, course_of
from resihp.compiler.simulate.prices import kinds_of, lengths_of, places_of, prices_of
from resihp.compiler.simulate.result import Simulation
from resihp.compiler.simulate.times import Floats, play
from resihp.ir.arrays import Arrays, Ints, arrays_of
from resihp.ir.model import Plan

__all__ = ["Simulator", "simulate"]


def simulate(
    plan: Plan,
    pricing: Pricing,
    *,
    lengths: Sequence[Lengths] | None = None,
    contention: bool = False,
    arrays: Arrays | None = None,
) -> Simulation:
    """Times of all instructions of a verified plan or schedule.

    `lengths` are those of the micro-batches of all replicas, home after home; fewer repeat.
    Without them each micro-batch is one document of the batch's tokens. `contention` costs time:
    every replica is played, event by event. `arrays` of the plan, where the verifier has made
    them, save time.

    Raises UserError for a plan that the verifier has findings about, or that needs a lost rank.
    """
    simulator = Simulator(plan, pricing, arrays=arrays, lengths=lengths, apart=contention)
    return simulator.run(lengths, contention=contention)


class Simulator:
    """One plan at the prices of one job, ready to be played.

    Replicas that are alike are played as one: in everything (`apart` keeps each), or in everything
    but `lengths`, if there are any. A simulator that is run with other lengths than it was made
    for keeps them apart.
    """

    def __init__(
        self,
        plan: Plan,
        pricing: Pricing,
        *,
        arrays: Arrays | None = None,
        lengths: Sequence[Lengths] | None = None,
        apart: bool = False,
    ) -> None:
        self.plan = plan
        self.pricing = pricing
        self.places = places_of(plan, pricing)
        # Replicas that are alike may still share links.
        each = np.arange(plan.mesh.dp).reshape(1, -1)
        kinds = each if apart else kinds_of(plan, pricing, self.places, lengths)
        if arrays is None or arrays.plan is not plan or not _keeps_apart(arrays, kinds):
            arrays = arrays_of(plan, kinds)
        self.course: Course = course_of(arrays)

    def run(
        self, lengths: Sequence[Lengths] | None = None, *, contention: bool = False
    ) -> Simulation:
        """One iteration. What sets replicas apart must be what the simulator was made for."""
        course, pricing, places = self.course, self.pricing, self.places
        tokens, pairs = lengths_of(self.plan, lengths)
        if lengths is not None:
            by_replica = np.stack((tokens, pairs)).reshape(2, self.plan.mesh.dp, -1)
            rows = by_replica.transpose(0, 2, 1).reshape(-1, self.plan.mesh.dp)
            assert _keeps_apart(course.arrays, rows), "made without `apart`, or other lengths"
        prices = prices_of(course, pricing, places, None if lengths is None else (tokens, pairs))
        late = None
        if contention:
            assert course.arrays.lanes.num == len(self.plan.groups), "made without `apart`"
            late, delay = contend(course, prices, loads_of(course, pricing, places))
            prices = prices._replace(delay=delay)
        times = play(course, prices, late)
        return Simulation(course, pricing, places, prices, times, float(tokens.sum()))


def _keeps_apart(arrays: Arrays, kinds: Ints | Floats) -> bool:
    """Whether replicas that are one in `arrays` are of one kind."""
    stands_for = np.maximum(arrays.stands_for, 0)
    return bool(((kinds == kinds[:, stands_for]) | (arrays.stands_for < 0)).all())
