"""Adaptation of plans with several stages per position, whose order only a schedule's name makes.

Interleaved and V-shaped orders are made again for the replicas that still have all stages, as they
run whole micro-batches only.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.compiler.adaptation.candidates import Candidate
from resihp.compiler.adaptation.decision import Considered
from resihp.compiler.adaptation.emit import check, lacking_bytes, lowered
from resihp.compiler.adaptation.layouts import on_layout
from resihp.compiler.adaptation.lowering import Outcome
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.schedules import SCHEDULES, runs_on
from resihp.compiler.simulate import simulate
from resihp.compiler.work import ordered, spread_work
from resihp.ir.model import Plan
from resihp.ir.placement import placement_of

__all__ = ["named_outcomes", "schedule_of"]

DEFAULT_SCHEDULES = ("1f1b", "interleaved-1f1b", "looped-bfs")
"""Of plans whose own schedule is none that the compiler can make: the first that fits."""


def named_outcomes(
    situation: Situation, found: Sequence[Candidate]
) -> tuple[Outcome | None, list[Considered]]:
    """The fastest plan of the candidates, and what became of each."""
    best: Outcome | None = None
    considered: list[Considered] = []
    for candidate in found:
        name = " + ".join(candidate.changes) or "reordered"
        plan = on_layout(situation, candidate.layout)
        kept = sorted({group.replica for group in candidate.layout.groups})
        work = spread_work(kept, plan.mesh.dp, plan.batch.microbatches)
        order = schedule_of(plan)
        streams = ordered(plan, order, work).streams
        made = lowered(situation, candidate.layout, streams, order=order)
        simulation = simulate(made, situation.pricing, lengths=situation.all_lengths)
        iteration_s = None
        why = "needs more memory than a device has"
        if not lacking_bytes(simulation):
            iteration_s, why = simulation.iteration_s, ""
            if best is None or iteration_s < best.iteration_s:
                best = Outcome(name, check(situation, simulation.plan), iteration_s)
        considered.append(
            Considered(
                name=name,
                num_groups_changed=candidate.num_changed(situation),
                iteration_s=iteration_s,
                why=why,
            )
        )
    return best, considered


def schedule_of(plan: Plan) -> str:
    """That of the plan if it can be made for the stages as they stand, else a default."""
    stages = placement_of(plan).stages
    held = [stages[pp] for pp in sorted(stages)]
    choices = [plan.schedule] if plan.schedule in SCHEDULES else []
    return next(kind for kind in [*choices, *DEFAULT_SCHEDULES] if runs_on(kind, held))
