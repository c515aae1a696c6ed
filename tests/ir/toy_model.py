"""A small model whose gradients tell whether a plan did what it says.

Residual layers of two matrices, cut by columns and rows over a TP group. Everything about a layer
or a micro-batch follows from its number, in float64: another micro-batch, another order of stages
or a term too many changes the gradient by far more than rounding does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from resihp.ir.model import Plan

Sum = Callable[[Tensor], Tensor]
"""All-reduce inside the TP group."""


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    ffn: int
    microbatches: int
    """Of the global batch."""


class Kept(NamedTuple):
    """What one layer keeps of a micro-batch."""

    x_TD: Tensor
    inner_TF: Tensor


def sizes_of(plan: Plan) -> Sizes:
    batch, model = plan.batch, plan.model
    return Sizes(batch.tokens, model.hidden, model.ffn, batch.microbatches * plan.mesh.dp)


def _random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def weights(sizes: Sizes, layer: int) -> tuple[Tensor, Tensor]:
    """Up and down projection of a layer, whole."""
    up_FD = _random(2 * layer, sizes.ffn, sizes.hidden) / sizes.hidden**0.5
    down_DF = _random(2 * layer + 1, sizes.hidden, sizes.ffn) / sizes.ffn**0.5
    return up_FD, down_DF


def first_input(sizes: Sizes, micro_batch: int) -> Tensor:
    return _random(10_000 + micro_batch, sizes.tokens, sizes.hidden)


def loss_gradient(sizes: Sizes, micro_batch: int, y_TD: Tensor) -> Tensor:
    """Of half the squared distance to the micro-batch's target, averaged over the global batch."""
    target_TD = _random(20_000 + micro_batch, sizes.tokens, sizes.hidden)
    return (y_TD - target_TD) / sizes.microbatches


class Layer:
    """The part of a layer that a member holds."""

    def __init__(self, sizes: Sizes, layer: int, member: int, tp: int) -> None:
        up_FD, down_DF = weights(sizes, layer)
        self.columns = slice(member * sizes.ffn // tp, (member + 1) * sizes.ffn // tp)
        self.up_FD, self.down_DF = up_FD[self.columns], down_DF[:, self.columns]
        self.grad_up_FD, self.grad_down_DF = torch.zeros_like(up_FD), torch.zeros_like(down_DF)
        """Whole, with zeros for what others hold."""

    def forward(self, x_TD: Tensor, add_up: Sum) -> tuple[Tensor, Kept]:
        inner_TF = torch.tanh(x_TD @ self.up_FD.T)
        return x_TD + add_up(inner_TF @ self.down_DF.T), Kept(x_TD, inner_TF)

    def backward(
        self, kept: Kept, grad_TD: Tensor, add_up: Sum
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient of the input, and what `weight` needs."""
        grad_inner_TF = (grad_TD @ self.down_DF) * (1 - kept.inner_TF**2)
        grad_x_TD = grad_TD + add_up(grad_inner_TF @ self.up_FD)
        return grad_x_TD, (kept.x_TD, kept.inner_TF, grad_inner_TF, grad_TD)

    def weight(
        self, x_TD: Tensor, inner_TF: Tensor, grad_inner_TF: Tensor, grad_TD: Tensor
    ) -> None:
        self.grad_up_FD[self.columns] += grad_inner_TF.T @ x_TD
        self.grad_down_DF[:, self.columns] += grad_TD.T @ inner_TF


def stacked(gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """One flat tensor."""
    return torch.cat([tensor.flatten() for pair in gradients for tensor in pair])


@lru_cache(maxsize=64)
def reference_gradients(sizes: Sizes, num_layers: int) -> list[tuple[Tensor, Tensor]]:
    """Per layer: one process, all micro-batches, torch's own differentiation."""
    params = [weights(sizes, layer) for layer in range(num_layers)]
    flat = [tensor.requires_grad_() for pair in params for tensor in pair]
    for micro_batch in range(sizes.microbatches):
        x_TD = first_input(sizes, micro_batch)
        for up_FD, down_DF in params:
            x_TD = x_TD + torch.tanh(x_TD @ up_FD.T) @ down_DF.T
        x_TD.backward(loss_gradient(sizes, micro_batch, x_TD.detach()))
    grads = [tensor.grad for tensor in flat if tensor.grad is not None]
    return list(zip(grads[::2], grads[1::2], strict=True))
