"""Layers whose weights are no autograd leaves: backward gives dx and leaves dW for later.

Each function takes the weight with its name and the micro-batch's `WeightGradStore`. In fp32 the
arithmetic and its order are those of autograd on the plain formulas, so that the gradients have
the same bits. In bf16 products are rounded to bf16, while means and angles are fp32.

What is saved for W is detached: it would hold on to the graph, which holds the store, which
holds it.

Shapes: T tokens of a micro-batch, D hidden size, I inputs and O outputs of a linear,
F feed-forward width on this member, H heads on this member, E head width.
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

__all__ = ["Bias", "linear", "rms_norm", "rotate", "swiglu"]

_ALONE = SingleMember()


class Bias(NamedTuple):
    """The bias of a linear, with its name."""

    name: str
    value_O: Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        w_OI: Tensor,
        bias: Bias | None,
        name: str,
        store: WeightGradStore,
        tp: TensorParallel,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.w_OI, ctx.name, ctx.store = w_OI, name, store
        ctx.bias_name = None if bias is None else bias.name
        if tp.degree == 1:
            return nnf.linear(x_TI, w_OI, None if bias is None else bias.value_O)
        y_TO = nnf.linear(x_TI, w_OI)
        tp.all_reduce_(y_TO)
        return y_TO if bias is None else y_TO.add_(bias.value_O)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy_TO,) = cast("tuple[Tensor]", grad_outputs)
        (x_TI,) = cast("tuple[Tensor]", ctx.saved_tensors)
        ctx.store.push(LinearEntry(ctx.name, x_TI.detach(), dy_TO))
        if ctx.bias_name is not None:
            ctx.store.push(BiasEntry(ctx.bias_name, dy_TO))
        return dy_TO @ ctx.w_OI, None, None, None, None, None


def linear(
    x_TI: Tensor,
    w_OI: Tensor,
    name: str,
    store: WeightGradStore,
    *,
    bias: Bias | None = None,
    row_parallel: TensorParallel = _ALONE,
) -> Tensor:
    """x Wᵀ + b, shape (T, O); a row-parallel one adds b to the sum of the members' outputs."""
    return apply(_Linear, x_TI, w_OI, bias, name, store, row_parallel)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, w_D: Tensor, name: str, store: WeightGradStore, eps: float
    ) -> Tensor:
        wide_TD = wide(x_TD)
        rrms_T1 = (wide_TD * wide_TD).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, rrms_T1)
        ctx.w_D, ctx.name, ctx.store = w_D, name, store
        return (wide_TD * rrms_T1).mul_(w_D).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy_TD,) = cast("tuple[Tensor]", grad_outputs)
        x_TD, rrms_T1 = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        ctx.store.push(NormEntry(ctx.name, x_TD.detach(), rrms_T1, dy_TD))
        dnormed_TD = wide(dy_TD) * ctx.w_D
        drrms_T1 = (dnormed_TD * x_TD).sum(-1, keepdim=True)
        # d rsqrt(v) = -1/2 rsqrt(v)^3 dv and d mean(x^2) = 2 x / D; factors of 2 are exact.
        dmean_T1 = drrms_T1.mul_(-0.5).mul_(rrms_T1.pow(3)).div_(x_TD.shape[-1])
        dx_TD = dnormed_TD.mul_(rrms_T1).add_(dmean_T1.mul_(2.0) * x_TD)
        return dx_TD.to(x_TD.dtype), None, None, None, None


def rms_norm(x_TD: Tensor, w_D: Tensor, name: str, store: WeightGradStore, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dim, shape (T, D)."""
    return apply(_RmsNorm, x_TD, w_D, name, store, eps)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return nnf.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        (dy_TF,) = cast("tuple[Tensor]", grad_outputs)
        gate_TF, up_TF = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        dgate_TF = torch.ops.aten.silu_backward(dy_TF * up_TF, gate_TF)
        return dgate_TF, nnf.silu(gate_TF).mul_(dy_TF)


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) · up, shape (T, F); keeps only its two inputs and redoes silu in B."""
    return apply(_SwiGlu, gate_TF, up_TF)


def _rotated(x_THE: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
    """Each pair (x[i], x[i + E/2]) turned by its angle."""
    first, second = x_THE.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_T1e - second * sin_T1e, second * cos_T1e + first * sin_T1e), dim=-1
    ).to(x_THE.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THE: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1e, sin_T1e)
        return _rotated(x_THE, cos_T1e, sin_T1e)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (dy_THE,) = cast("tuple[Tensor]", grad_outputs)
        cos_T1e, sin_T1e = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        return _rotated(dy_THE, cos_T1e, -sin_T1e), None, None


def rotate(x_THE: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
    """x turned by its angles (see `rope`), with the half-split pairing of HF LLaMA."""
    return apply(_Rotate, x_THE, cos_T1e, sin_T1e)
