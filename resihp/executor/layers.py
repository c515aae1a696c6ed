"""Layers whose weights are no autograd leaves: backward gives dx and leaves dW for later.

Each function takes its weights with their names and the micro-batch's `WeightGradStore`. In fp32
the arithmetic and its order are those of autograd on the plain formulas, so that the gradients
have the same bits; `blocks` puts several layers into one node of the graph. In bf16 products are
rounded to bf16, while means and angles are fp32.

What is saved for W is detached: it would hold on to the graph, which holds the store, which
holds it.

Shapes: T tokens of a micro-batch, D hidden size, I inputs and O outputs of a linear, H heads on
this member, E head width, e half of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from resihp.executor.function import apply
from resihp.executor.precision import wide
from resihp.executor.tp import SingleMember, TensorParallel
from resihp.executor.weight_grads import BiasEntry, LinearEntry, NormEntry, WeightGradStore

__all__ = [
    "Affine",
    "Bias",
    "Norm",
    "affine",
    "affine_backward",
    "linear",
    "normalize",
    "normalize_backward",
    "rms_norm",
    "rotated",
    "row_affine",
]

_ALONE = SingleMember()


class Bias(NamedTuple):
    """The bias of a linear, with its name."""

    name: str
    value_O: Tensor


class Affine(NamedTuple):
    """A linear's weight with its name, and its bias if it has one."""

    name: str
    w_OI: Tensor
    bias: Bias | None = None


class Norm(NamedTuple):
    """A norm's weight with its name, and what keeps its root from zero."""

    name: str
    w_D: Tensor
    eps: float


# --- what the layers are made of, without autograd


def affine(x_TI: Tensor, layer: Affine) -> Tensor:
    """x Wᵀ + b, shape (T, O)."""
    return nnf.linear(x_TI, layer.w_OI, None if layer.bias is None else layer.bias.value_O)


def row_affine(x_TI: Tensor, layer: Affine, tp: TensorParallel) -> Tensor:
    """The members' x Wᵀ summed, then + b; a new tensor of shape (T, O)."""
    if tp.degree == 1:
        return affine(x_TI, layer)
    y_TO = nnf.linear(x_TI, layer.w_OI)
    tp.all_reduce_(y_TO)
    return y_TO if layer.bias is None else y_TO.add_(layer.bias.value_O)


def affine_backward(dy_TO: Tensor, x_TI: Tensor, layer: Affine, store: WeightGradStore) -> Tensor:
    """dx, a new tensor; leaves the operands of dW and db in `store`."""
    store.push(LinearEntry(layer.name, x_TI, dy_TO))
    if layer.bias is not None:
        store.push(BiasEntry(layer.bias.name, dy_TO))
    return dy_TO @ layer.w_OI


def normalize(x_TD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """x r w, and the reciprocal root mean square r of shape (T, 1)."""
    wide_TD = wide(x_TD)
    rrms_T1 = (wide_TD * wide_TD).mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    return (wide_TD * rrms_T1).mul_(norm.w_D).to(x_TD.dtype), rrms_T1


def normalize_backward(
    dy_TD: Tensor, x_TD: Tensor, rrms_T1: Tensor, norm: Norm, store: WeightGradStore
) -> Tensor:
    """dx, a new tensor; leaves the operands of dw in `store`."""
    store.push(NormEntry(norm.name, x_TD, rrms_T1, dy_TD))
    dnormed_TD = wide(dy_TD) * norm.w_D
    drrms_T1 = (dnormed_TD * x_TD).sum(-1, keepdim=True)
    # d rsqrt(v) = -1/2 rsqrt(v)^3 dv and d mean(x^2) = 2 x / D; the factors cancel, exactly.
    dmean_T1 = drrms_T1.mul_(rrms_T1.pow(3)).div_(x_TD.shape[-1])
    return dnormed_TD.mul_(rrms_T1).sub_(dmean_T1 * x_TD).to(x_TD.dtype)


def rotated(x_THE: Tensor, cos_T1e: Tensor, sin_T1e: Tensor, *, back: bool = False) -> Tensor:
    """Each pair (x[i], x[i + E/2]) turned by its angle (see `rope`), or back by it.

    The pairing is that of HF LLaMA.
    """
    x_TH2e = x_THE.view(*x_THE.shape[:-1], 2, -1)
    y_TH2e, across_TH2e = x_TH2e * cos_T1e[:, None], x_TH2e * sin_T1e[:, None]
    (first, second), (of_first, of_second) = y_TH2e.unbind(-2), across_TH2e.unbind(-2)
    if back:
        first.add_(of_second)
        second.sub_(of_first)
    else:
        first.sub_(of_second)
        second.add_(of_first)
    return y_TH2e.flatten(-2).to(x_THE.dtype)


# --- layers


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        residual_TO: Tensor | None,
        layer: Affine,
        store: WeightGradStore,
        tp: TensorParallel,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.layer, ctx.store, ctx.has_residual = layer, store, residual_TO is not None
        y_TO = row_affine(x_TI, layer, tp)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy_TO,) = cast("tuple[Tensor]", grad_outputs)
        (x_TI,) = cast("tuple[Tensor]", ctx.saved_tensors)
        dx_TI = affine_backward(dy_TO, x_TI.detach(), ctx.layer, ctx.store)
        return dx_TI, dy_TO if ctx.has_residual else None, None, None, None


def linear(
    x_TI: Tensor,
    layer: Affine,
    store: WeightGradStore,
    *,
    row_parallel: TensorParallel = _ALONE,
    residual_TO: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b + residual, shape (T, O); a row-parallel one sums x Wᵀ over the members first."""
    return apply(_Linear, x_TI, residual_TO, layer, store, row_parallel)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, norm: Norm, store: WeightGradStore) -> Tensor:
        y_TD, rrms_T1 = normalize(x_TD, norm)
        ctx.save_for_backward(x_TD, rrms_T1)
        ctx.norm, ctx.store = norm, store
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy_TD,) = cast("tuple[Tensor]", grad_outputs)
        x_TD, rrms_T1 = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        return normalize_backward(dy_TD, x_TD.detach(), rrms_T1, ctx.norm, ctx.store), None, None


def rms_norm(x_TD: Tensor, norm: Norm, store: WeightGradStore) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dim, shape (T, D)."""
    return apply(_RmsNorm, x_TD, norm, store)
