"""Neutral facts about sizes that the verifier needs and the compiler (or a user) supplies."""

from __future__ import annotations

import msgspec

from resihp.ir.model import GroupName

__all__ = ["Facts", "StageFacts"]


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one stage on one member of its TP group, per micro-batch unless said otherwise.

    F adds `activation_bytes`; B adds `weight_input_grad_bytes` (the output gradients that W needs,
    and what it computes again of what F did not keep) and gives back `released_by_b_bytes`; W
    gives back the rest.
    """

    state_bytes: int
    """Parameters, moments, gradient accumulators and the reduced copy; always resident."""
    activation_bytes: int
    released_by_b_bytes: int
    weight_input_grad_bytes: int
    boundary_bytes: int
    """One whole activation (or its gradient) between stages: tokens * hidden * element size."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of every group of a plan: one per stage that it runs, in the order of its layers."""

    stages: dict[GroupName, tuple[StageFacts, ...]]
