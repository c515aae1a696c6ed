"""What is predicted of a plan in a few figures, by simulation and by the verifier's account."""

from __future__ import annotations

import msgspec

from resihp.compiler.capacity import peak_bytes
from resihp.compiler.costs import Lengths
from resihp.compiler.models import Model, training_flops
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.ir.model import GroupName, Plan, Precision

__all__ = ["Prediction", "predict"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one iteration of a plan whose micro-batches are one document each."""

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


def predict(plan: Plan, model: Model, pricing: Pricing) -> Prediction:
    """Figures of a verified `plan` of `model` at the prices of a job."""
    simulation = simulate(plan, pricing)
    groups = simulation.groups()
    peaks = peak_bytes(plan)
    fullest = max(peaks, key=lambda name: peaks[name])
    return Prediction(
        iteration_s=simulation.iteration_s,
        tokens_per_s=simulation.tokens_per_s,
        bubble_share=sum(g.bubble_s for g in groups) / (len(groups) * simulation.iteration_s),
        flops_share=_useful_flops_per_s(plan, model, simulation.iteration_s)
        / (plan.mesh.world * _peak_flops(pricing, plan.precision)),
        peak_bytes=peaks[fullest],
        fullest=fullest,
    )


def _useful_flops_per_s(plan: Plan, model: Model, iteration_s: float) -> float:
    tokens, pairs = Lengths.of([plan.batch.tokens])
    per_micro_batch = training_flops(model, tokens, pairs)
    return plan.mesh.dp * plan.batch.microbatches * per_micro_batch / iteration_s


def _peak_flops(pricing: Pricing, precision: Precision) -> float:
    device = pricing.cluster.device
    return 1e12 * (device.bf16_tflops if precision == "bf16" else device.fp32_tflops)
