"""Runs of layers as one node of the autograd graph each: what a decoder layer is made of.

A node written in Python costs as much as several small operations, so neighbours share one. The
operations and what is kept are those of the layers apart; gradients that meet are added in the
order in which autograd adds them, the last use first.

Shapes: T tokens of a micro-batch, D hidden size, F feed-forward width and H query, K key/value
heads on this member, E head width, e half of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from resihp.executor.function import apply
from resihp.executor.layers import (
    Affine,
    Norm,
    affine,
    affine_backward,
    normalize,
    normalize_backward,
    rotated,
    row_affine,
)

if TYPE_CHECKING:
    from resihp.executor.tp import TensorParallel
    from resihp.executor.weight_grads import WeightGradStore

__all__ = ["FeedForward", "Projections", "feed_forward", "project"]


class Projections(NamedTuple):
    """Weights before attention; the three linears are column-parallel."""

    norm: Norm
    q: Affine
    k: Affine
    v: Affine
    head_dim: int


class FeedForward(NamedTuple):
    """Weights after attention; gate and up are column-parallel, down is row-parallel."""

    norm: Norm
    gate: Affine
    up: Affine
    down: Affine


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        cos_T1e: Tensor,
        sin_T1e: Tensor,
        layers: Projections,
        store: WeightGradStore,
        tp: TensorParallel,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed_TD, rrms_T1 = normalize(x_TD, layers.norm)
        ctx.save_for_backward(x_TD, rrms_T1, normed_TD, cos_T1e, sin_T1e)
        ctx.layers, ctx.store, ctx.tp = layers, store, tp
        shape = (len(x_TD), -1, layers.head_dim)
        return (
            rotated(affine(normed_TD, layers.q).view(shape), cos_T1e, sin_T1e),
            rotated(affine(normed_TD, layers.k).view(shape), cos_T1e, sin_T1e),
            affine(normed_TD, layers.v).view(shape),
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        dq_THE, dk_TKE, dv_TKE = cast("tuple[Tensor, Tensor, Tensor]", grad_outputs)
        x_TD, rrms_T1, normed_TD, cos_T1e, sin_T1e = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        layers, store = cast("Projections", ctx.layers), cast("WeightGradStore", ctx.store)
        dnormed_TD = affine_backward(dv_TKE.flatten(1), normed_TD, layers.v, store)
        for layer, dy in (layers.k, dk_TKE), (layers.q, dq_THE):
            dy_TO = rotated(dy, cos_T1e, sin_T1e, back=True).flatten(1)
            dnormed_TD.add_(affine_backward(dy_TO, normed_TD, layer, store))
        ctx.tp.all_reduce_(dnormed_TD)
        dx_TD = normalize_backward(dnormed_TD, x_TD.detach(), rrms_T1, layers.norm, store)
        return dx_TD, None, None, None, None, None


def project(
    x_TD: Tensor,
    rope: tuple[Tensor, Tensor],
    layers: Projections,
    store: WeightGradStore,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries (T, H, E) and keys (T, K, E), and values (T, K, E), of the normed x.

    `rope` are cosine and sine of the angles, (T, 1, e) each.
    """
    outputs: Any = apply(_Project, x_TD, *rope, layers, store, tp)
    return outputs


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, layers: FeedForward, store: WeightGradStore, tp: TensorParallel
    ) -> Tensor:
        normed_TD, rrms_T1 = normalize(x_TD, layers.norm)
        gate_TF, up_TF = affine(normed_TD, layers.gate), affine(normed_TD, layers.up)
        silu_TF = nnf.silu(gate_TF)
        ctx.save_for_backward(x_TD, rrms_T1, normed_TD, gate_TF, up_TF, silu_TF)
        ctx.layers, ctx.store, ctx.tp = layers, store, tp
        return row_affine(silu_TF * up_TF, layers.down, tp).add_(x_TD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (dy_TD,) = cast("tuple[Tensor]", grad_outputs)
        x_TD, rrms_T1, normed_TD, gate_TF, up_TF, silu_TF = cast(
            "tuple[Tensor, ...]", ctx.saved_tensors
        )
        layers, store = cast("FeedForward", ctx.layers), cast("WeightGradStore", ctx.store)
        # W needs the product, which is cheap to redo in the place of silu; so B runs only once.
        dproduct_TF = affine_backward(dy_TD, silu_TF, layers.down, store)
        dup_TF = silu_TF * dproduct_TF
        silu_TF.mul_(up_TF)
        dnormed_TD = affine_backward(dup_TF, normed_TD, layers.up, store)
        dgate_TF = torch.ops.aten.silu_backward(dproduct_TF.mul_(up_TF), gate_TF)
        dnormed_TD.add_(affine_backward(dgate_TF, normed_TD, layers.gate, store))
        ctx.tp.all_reduce_(dnormed_TD)
        dx_TD = normalize_backward(dnormed_TD, x_TD.detach(), rrms_T1, layers.norm, store)
        return dx_TD.add_(dy_TD), None, None, None


def feed_forward(
    x_TD: Tensor, layers: FeedForward, store: WeightGradStore, tp: TensorParallel
) -> Tensor:
    """x + down(silu(gate) · up) of the normed x, shape (T, D)."""
    return apply(_FeedForward, x_TD, layers, store, tp)
