"""What sums over channels, tokens and vocabulary are computed in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["wide"]

_NARROW = (torch.bfloat16, torch.float16)


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 where it is narrower, else itself."""
    return tensor.float() if tensor.dtype in _NARROW else tensor
