"""Initial weights that depend on tensor names only, so that every layout starts from the same.

Each logical tensor is drawn whole, one at a time, and this member's shard kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resihp.executor.keyed_random import keyed_seed
from resihp.executor.shards import local_shard, logical_shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from resihp.executor.llama import LlamaConfig

__all__ = ["initial_parameters", "initial_tensor"]


def initial_tensor(config: LlamaConfig, name: str, seed: int) -> Tensor:
    """The whole tensor `name`, fp32 on CPU: ones for norms, else N(0, initializer_range²)."""
    shape = logical_shape(config, name)
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(keyed_seed("init", seed, name))
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def initial_parameters(
    config: LlamaConfig,
    names: Iterable[str],
    seed: int,
    *,
    degree: int = 1,
    index: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Member `index` of `degree`'s shards of the named tensors, on `device`."""
    return {
        name: local_shard(name, initial_tensor(config, name, seed), degree, index).to(device)
        for name in names
    }
