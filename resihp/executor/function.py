"""The one place where torch's untyped autograd meets the typed layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply", "backward_on_this_thread"]


def apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """The single output of `function` on `args`, recorded by autograd."""
    return cast("Tensor", cast("Any", function).apply(*args))


def backward_on_this_thread() -> AbstractContextManager[Any]:
    """Inside, backward passes run on the calling thread, as they do on CPU anyway.

    On CUDA torch has one thread per device for them. A collective of a backward would block it,
    and with it the backward of another rank of this process that the collective waits for.
    """
    return cast("Any", torch.autograd).set_multithreading_enabled(False)
