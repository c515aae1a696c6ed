"""The one place where torch's untyped `Function.apply` meets the typed layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["apply"]


def apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """The single output of `function` on `args`, recorded by autograd."""
    return cast("Tensor", cast("Any", function).apply(*args))
