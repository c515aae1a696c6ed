"""What is predicted of a plan in a few figures, by simulation and by the verifier's account."""

from __future__ import annotations

import msgspec

from resihp.compiler.costs import Lengths
from resihp.compiler.models import Model, training_flops
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.ir.model import GroupName, Plan, Precision

__all__ = ["Prediction", "predict"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one iteration of a plan whose micro-batches are all alike."""

    iteration_s: float
    tokens_per_s: float
    """Of the whole job."""
    bubble_share: float
    """Of the time of all groups: neither computing nor reducing nor updating."""
    flops_share: float
    """Of the peak of all devices that the model's own FLOPs need (its "MFU")."""
    peak_bytes: int
    """Of the fullest device."""
    fullest: GroupName
    """The group that it is in."""


def predict(
    plan: Plan, model: Model, pricing: Pricing, lengths: Lengths | None = None
) -> Prediction:
    """Figures of a verified `plan` of `model` at the prices of a job.

    `lengths` are those of every micro-batch (None: one document).
    """
    if lengths is None:
        lengths = Lengths.of([plan.batch.tokens])
    simulation = simulate(plan, pricing, lengths=[lengths])
    groups = simulation.groups()
    fullest = max(simulation.peaks(), key=lambda peak: peak.num_bytes)
    return Prediction(
        iteration_s=simulation.iteration_s,
        tokens_per_s=simulation.tokens_per_s,
        bubble_share=sum(g.bubble_s for g in groups) / (len(groups) * simulation.iteration_s),
        flops_share=_useful_flops(plan, model, lengths)
        / (simulation.iteration_s * plan.mesh.world * _peak_flops(pricing, plan.precision)),
        peak_bytes=fullest.num_bytes,
        fullest=fullest.group.name,
    )


def _useful_flops(plan: Plan, model: Model, lengths: Lengths) -> float:
    return plan.mesh.dp * plan.batch.microbatches * training_flops(model, *lengths)


def _peak_flops(pricing: Pricing, precision: Precision) -> float:
    device = pricing.cluster.device
    return 1e12 * (device.bf16_tflops if precision == "bf16" else device.fp32_tflops)
