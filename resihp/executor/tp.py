"""Tensor parallelism as the layers see it: a group that can sum a tensor over its members.

A column-parallel linear holds rows of its weight (dim 0), a row-parallel one columns (dim 1).
Between the two no communication is needed; before the first the gradient is summed, after the
second the output is (Megatron-LM, Shoeybi et al. 2019, section 3).

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from resihp.executor.function import apply

__all__ = ["SingleMember", "TensorParallel", "enter_column_parallel"]


class TensorParallel(Protocol):
    """One member of a group of `degree` members that hold shards of the same layers."""

    @property
    def degree(self) -> int:
        """Members of the group; a power of two."""
        ...

    @property
    def index(self) -> int:
        """Which member this is, and which shard of `degree` it holds."""
        ...

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the members in place; returns when the sum is there.

        Every member calls it in the same order, and all get the same bits.
        """
        ...


class SingleMember:
    """A group of degree 1: nothing to sum."""

    degree = 1
    index = 0

    def all_reduce_(self, tensor: Tensor) -> None:
        """Leave `tensor` as it is."""


class _EnterColumnParallel(torch.autograd.Function):
    """Identity forward; backward sums the members' partial input gradients."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (dy_TD,) = cast("tuple[Tensor]", grad_outputs)
        dx_TD = dy_TD.clone()  # autograd may still own what it hands us
        ctx.tp.all_reduce_(dx_TD)
        return dx_TD, None


def enter_column_parallel(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    """The input of column-parallel linears: unchanged, with its gradient summed over the group."""
    if tp.degree == 1:
        return x_TD
    return apply(_EnterColumnParallel, x_TD, tp)
