"""Initial weights that depend on tensor names only, so that every layout starts from the same.

Each logical tensor is drawn whole, one at a time, and this member's shard kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.executor.layouts import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor

    from resihp.executor.model import Model

__all__ = ["initial_parameters"]


def initial_parameters(
    model: Model,
    names: Iterable[str],
    seed: int,
    *,
    degree: int = 1,
    index: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Member `index` of `degree`'s shards of the named tensors, on `device`."""
    return {
        name: local_shard(model.layout(name), model.initial(name, seed), degree, index).to(device)
        for name in names
    }
