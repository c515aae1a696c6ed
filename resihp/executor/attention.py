"""Causal attention inside each document of a packed window, in three forms.

The cost of the first two follows the sum of squared segment lengths, so that a window of many
short documents is cheap; the third is the textbook's and the oracle of the others.

- `per-document`: one call of scaled-dot-product attention per segment. Of what torch offers on
  CPU it is the only one that exploits the blocks and has a backward.
- `varlen`: one variable-length kernel over all segments. CUDA with bf16 or fp16 only.
- `masked`: the whole window with everything outside the segment masked out.

`documents` is whichever of the first two the device and the precision have.

Shapes: T tokens of a micro-batch, H query heads and K key/value heads on this member, E head
width, N segments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from resihp.executor.flat import upload

__all__ = ["FORMS", "document_attention", "form_for"]

_LARGEST_FLASH_WIDTH = 256


def document_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cu_seqlens: Sequence[int],
    form: str = "documents",
) -> Tensor:
    """Block-diagonal causal attention, shape (T, H, E); H is a multiple of K.

    `cu_seqlens` are the bounds of the segments: segment i is tokens
    `cu_seqlens[i] .. cu_seqlens[i + 1] - 1`, and no token sees another segment.
    """
    if form == "documents":
        form = form_for(q_THE)
    return _ATTEND[form](q_THE, k_TKE, v_TKE, cu_seqlens)


def form_for(q_THE: Tensor) -> str:
    """The form of `documents` for such queries: `varlen` where its kernel exists."""
    flash = (
        q_THE.is_cuda
        and q_THE.dtype in (torch.bfloat16, torch.float16)
        and q_THE.shape[-1] <= _LARGEST_FLASH_WIDTH
        and _varlen_kernel() is not None
    )
    return "varlen" if flash else "per-document"


def _per_document(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    if len(cu_seqlens) == 2:
        return _attend(q_THE, k_TKE, v_TKE)
    # The gradient of a split is one concatenation; that of a slice is as long as the window.
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    segments = (torch.split(x, lengths) for x in (q_THE, k_TKE, v_TKE))
    return torch.cat([_attend(*parts) for parts in zip(*segments, strict=True)])


def _masked(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    segment_T = torch.zeros(q_THE.shape[0], dtype=torch.long)
    segment_T[list(cu_seqlens[1:-1])] = 1
    segment_T = segment_T.cumsum(0).to(q_THE.device)
    seen_TT = (segment_T[:, None] == segment_T[None, :]).tril()
    return _attend(q_THE, k_TKE, v_TKE, seen_TT)


def _attend(q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, mask_LL: Tensor | None = None) -> Tensor:
    """Torch's attention over one run of tokens; causal where no mask says who is seen."""
    out_1HLE = nnf.scaled_dot_product_attention(
        q_LHE.transpose(0, 1)[None],
        k_LKE.transpose(0, 1)[None],
        v_LKE.transpose(0, 1)[None],
        attn_mask=mask_LL,
        is_causal=mask_LL is None,
        enable_gqa=q_LHE.shape[1] != k_LKE.shape[1],
    )
    return out_1HLE[0].transpose(0, 1)


def _varlen(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    kernel = _varlen_kernel()
    assert kernel is not None, "this torch has no variable-length attention"
    stream = torch.cuda.current_stream(q_THE.device).stream_id
    bounds_N = _bounds_on(tuple(cu_seqlens), q_THE.device, stream)
    longest = max(end - start for start, end in pairwise(cu_seqlens))
    return kernel(
        q_THE,
        k_TKE,
        v_TKE,
        bounds_N,
        bounds_N,
        longest,
        longest,
        window_size=(-1, 0),  # causal
        enable_gqa=q_THE.shape[1] != k_TKE.shape[1],
    )


@lru_cache(maxsize=64)
def _bounds_on(cu_seqlens: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The bounds as the kernel reads them; all layers of a micro-batch share one copy.

    `stream` is the number of the current stream, on which alone the copy may be used.
    """
    return upload(torch.tensor(cu_seqlens, dtype=torch.int32), device)


@lru_cache(maxsize=1)
def _varlen_kernel() -> Callable[..., Any] | None:
    """Torch's `varlen_attn`, None where it is older than the arguments that we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= known.keys() else None


_ATTEND = {"per-document": _per_document, "varlen": _varlen, "masked": _masked}
FORMS = ("documents", *_ATTEND)
"""Values of `StageOptions.attention`."""
