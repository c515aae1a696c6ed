"""Which window each micro-batch of each step trains on: a pure function of its position.

Position p is step * (micro-batches per global batch) + home * (micro-batches per replica) +
micro-batch number. Epoch p // num_windows has its own permutation of the windows; a global batch
may straddle two epochs. So every window is used exactly once per epoch, whatever runs where and
whatever failed, and the place to resume from is the number of the step, nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from resihp.executor.keyed_random import keyed_permutation

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from resihp.executor.packing import MicroBatch, Packing

__all__ = ["GlobalBatches", "Sampler"]


@lru_cache(maxsize=4)
def _epoch_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return keyed_permutation(num_windows, "epoch order", seed, epoch)


class Sampler:
    """Order of `num_windows` windows, epoch after epoch."""

    def __init__(self, num_windows: int, seed: int) -> None:
        assert num_windows > 0
        self.num_windows = num_windows
        self.seed = seed

    def sample_id(self, position: int) -> int:
        """The window at `position`, which counts micro-batches from the start of training."""
        epoch, offset = divmod(position, self.num_windows)
        return int(_epoch_order(self.num_windows, self.seed, epoch)[offset])

    def sample_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """The windows at `count` positions from `first` on."""
        runs: list[NDArray[np.int64]] = []
        while count > 0:
            epoch, offset = divmod(first, self.num_windows)
            runs.append(_epoch_order(self.num_windows, self.seed, epoch)[offset : offset + count])
            first, count = first + len(runs[-1]), count - len(runs[-1])
        return np.concatenate(runs)


class GlobalBatches:
    """The micro-batches of every step, by home replica and number at home."""

    def __init__(
        self, packing: Packing, sampler: Sampler, num_replicas: int, num_microbatches: int
    ) -> None:
        self._packing = packing
        self._sampler = sampler
        self.num_replicas = num_replicas
        self.num_microbatches = num_microbatches

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self._sampler.num_windows

    def sample_id(self, step: int, home: int, micro_batch: int) -> int:
        """The window of micro-batch `micro_batch` of logical replica `home` in step `step`."""
        assert 0 <= home < self.num_replicas
        assert 0 <= micro_batch < self.num_microbatches
        index = home * self.num_microbatches + micro_batch
        return self._sampler.sample_id(step * self._per_step + index)

    def micro_batch(
        self, step: int, home: int, micro_batch: int, device: torch.device | str = "cpu"
    ) -> MicroBatch:
        """The micro-batch as tensors on `device`."""
        return self._packing.micro_batch(self.sample_id(step, home, micro_batch), device)

    def num_targets(self, step: int) -> int:
        """Targets of the global batch; one over it is the loss scale. Builds no tensor."""
        first = step * self._per_step
        return self._packing.sum_of_targets(self._sampler.sample_ids(first, self._per_step))

    @property
    def _per_step(self) -> int:
        return self.num_replicas * self.num_microbatches
