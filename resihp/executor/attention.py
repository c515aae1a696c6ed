"""Causal attention inside each document of a packed window.

One call per segment: of what torch offers on CPU it is the only one whose cost follows the sum
of squared segment lengths and that has a backward.

Shapes: T tokens of a micro-batch, H query heads and K key/value heads on this member, E head width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as nnf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["document_attention"]


def document_attention(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Sequence[int]
) -> Tensor:
    """Block-diagonal causal attention, shape (T, H, E).

    `cu_seqlens` are the bounds of the segments: segment i is tokens
    `cu_seqlens[i] .. cu_seqlens[i + 1] - 1`, and no token sees another segment.
    """
    parts = [
        _causal(q_THE[start:end], k_TKE[start:end], v_TKE[start:end])
        for start, end in pairwise(cu_seqlens)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal(q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor) -> Tensor:
    out_1HLE = nnf.scaled_dot_product_attention(
        q_LHE.transpose(0, 1)[None],
        k_LKE.transpose(0, 1)[None],
        v_LKE.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=q_LHE.shape[1] != k_LKE.shape[1],
    )
    return out_1HLE[0].transpose(0, 1)
