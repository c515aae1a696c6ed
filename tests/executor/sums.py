"""The gradient of the global batch, the obvious way: all replicas in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from resihp.executor.gradients import tree_sum


def combine_replicas(sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """From the per-replica sums, in order of logical replica."""
    return {name: tree_sum([grads[name] for grads in sums]) for name in sums[0]}
