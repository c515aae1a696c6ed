"""Flat messages: cutting one tensor into consecutive parts, and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

__all__ = ["FP32_BYTES", "bytes_of", "split_flat", "tensor_of"]

FP32_BYTES = 4


def split_flat(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive views of `sizes` elements; they add up to all of `flat`."""
    assert flat.numel() == sum(sizes), f"{flat.numel()} elements, not {sum(sizes)}"
    return list(torch.split(flat, list(sizes)))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(cast("bytearray", tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def tensor_of(raw: bytearray | memoryview | Tensor, dtype: torch.dtype) -> Tensor:
    """The flat tensor in a received message, without a copy: a buffer, or bytes on a device."""
    if isinstance(raw, Tensor):
        return raw.view(dtype)
    return torch.frombuffer(raw, dtype=dtype)
