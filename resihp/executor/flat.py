"""Flat messages: cutting one tensor into consecutive parts, and its bytes.

torch is imported where a tensor is at hand: emulated devices send bytes and never load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["FP32_BYTES", "bytes_of", "split_flat", "tensor_of", "upload", "used_here"]

FP32_BYTES = 4


def split_flat(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive views of `sizes` elements; they add up to all of `flat`."""
    assert flat.numel() == sum(sizes), f"{flat.numel()} elements, not {sum(sizes)}"
    import torch

    return list(torch.split(flat, list(sizes)))


def bytes_of(tensor: Tensor | bytes) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; bytes are sent as they are."""
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    import torch

    return memoryview(cast("bytearray", tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def tensor_of(raw: bytearray | memoryview | Tensor, dtype: torch.dtype) -> Tensor:
    """The flat tensor in a received message, without a copy: a buffer, or bytes on a device."""
    import torch

    if isinstance(raw, torch.Tensor):
        return raw.view(dtype)
    return torch.frombuffer(raw, dtype=dtype)


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A small CPU tensor on `device`, itself where it is there.

    To CUDA it goes from pinned memory, on the current stream, so that the host does not wait.
    """
    import torch

    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def used_here(tensors: Iterable[Tensor]) -> None:
    """The current CUDA stream reads `tensors` of another one's pool, which we may let go first."""
    import torch

    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
