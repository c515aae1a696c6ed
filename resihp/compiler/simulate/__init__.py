"""The simulator: when every instruction of a plan starts and ends, given what everything costs.

What is simulated is the plan itself (Eq. 2 of the paper over its instructions), so what is
predicted is what runs:

* A stream runs in order. F, B, W and BW take what `Pricing.compute_s` says of their micro-batch.
* A send is posted and takes no time. The tensor may be used `Pricing.crossing` later, the
  gather of its chunks included, which runs beside the stream's compute. The stream waits at the
  gather or the compute that uses it.
* `reduce_grads` waits for all holders of its stage and takes `Pricing.reduce_s`; `step` waits for
  all groups and takes `Pricing.step_s`.
* An overlapped pair starts once the inputs of both are there and takes the time of both.
* With `contention` transfers queue for links (`contention`); without, they do not.
* In a schedule, a result is on its way once it is made; nothing is reduced.

Replicas that do the same at the same prices are played once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.compiler.costs import Lengths
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate.contention import contend, loads_of
from resihp.compiler.simulate.course import course_of
from resihp.compiler.simulate.prices import kinds_of, lengths_of, places_of, prices_of
from resihp.compiler.simulate.result import Simulation
from resihp.compiler.simulate.times import play
from resihp.ir.model import Plan

__all__ = ["Simulation", "simulate"]


def simulate(
    plan: Plan,
    pricing: Pricing,
    *,
    lengths: Sequence[Lengths] | None = None,
    contention: bool = False,
) -> Simulation:
    """Times of all instructions of a verified plan or schedule.

    `lengths` are those of the micro-batches of all replicas, home after home; fewer repeat.
    Without them each micro-batch is one document of the batch's tokens. `contention` costs time:
    every replica is played, event by event.

    Raises UserError for a plan that the verifier has findings about, or that needs a lost rank.
    """
    places = places_of(plan, pricing)
    # Replicas that are alike may still share links.
    apart = np.arange(plan.mesh.dp).reshape(1, -1)
    course = course_of(plan, apart if contention else kinds_of(plan, pricing, places, lengths))
    prices = prices_of(course, pricing, places, lengths)
    late = None
    if contention:
        late, delay = contend(course, prices, loads_of(course, pricing, places))
        prices = prices._replace(delay=delay)
    num_tokens = float(lengths_of(plan, lengths)[0].sum())
    return Simulation(course, pricing, places, prices, play(course, prices, late), num_tokens)
