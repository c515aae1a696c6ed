"""Documents laid one after another into fixed windows; one window is one micro-batch.

In a seeded order, documents are laid whole, without padding. Where a window ends inside a
document, the next window begins with the rest of it as a segment of its own: attention and
positions start anew there. The target of a token is the next token of its document, also when
that one lies in the next window; only a document's last token has none.

What is left at the very end and does not fill a window is not used.

Shapes: T tokens of a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resihp.errors import ConfigError
from resihp.executor.flat import upload
from resihp.executor.keyed_random import keyed_permutation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resihp.executor.data import Dataset

__all__ = ["IGNORED_TARGET", "MicroBatch", "Packing"]

IGNORED_TARGET = -100
"""Target of a token that has no next token in its document."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One packed window, as the model reads it."""

    sample_id: int
    """Number of the window."""
    input_ids_T: Tensor
    targets_T: Tensor
    """The next token, or `IGNORED_TARGET`."""
    position_ids_T: Tensor
    """Position inside the segment."""
    cu_seqlens: tuple[int, ...]
    """Bounds of the segments, from 0 to T."""
    num_targets: int


class Packing:
    """A dataset cut into `num_windows` windows of `num_tokens` tokens; a pure function of `seed`.

    Raises `ConfigError` if the dataset does not fill a single window.
    """

    def __init__(self, dataset: Dataset, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        self.num_windows = len(dataset.tokens_N) // num_tokens
        if self.num_windows == 0:
            raise ConfigError(
                f"the data hold {len(dataset.tokens_N)} tokens, fewer than one micro-batch of "
                f"{num_tokens}: name a larger source or a smaller number of tokens"
            )
        lengths = np.diff(dataset.bounds)
        order = keyed_permutation(len(lengths), "document order", seed)
        self._tokens_N = dataset.tokens_N
        self._starts = dataset.bounds[:-1][order]
        # Where the laid documents begin and end in the packed stream.
        self._bounds = np.concatenate(([0], np.cumsum(lengths[order])))
        edges = np.arange(self.num_windows + 1) * num_tokens
        self._num_targets = num_tokens - np.diff(
            np.searchsorted(self._bounds[1:], edges, side="right")
        )

    def num_targets(self, sample_id: int) -> int:
        """Targets of a window, without building it."""
        return int(self._num_targets[sample_id])

    def sum_of_targets(self, sample_ids: NDArray[np.int64]) -> int:
        """Targets of several windows together."""
        return int(self._num_targets[sample_ids].sum())

    def micro_batch(self, sample_id: int, device: torch.device | str = "cpu") -> MicroBatch:
        """The window `sample_id` as tensors on `device`."""
        ids_T = np.empty(self.num_tokens, np.int64)
        targets_T = np.full(self.num_tokens, IGNORED_TARGET, np.int64)
        positions_T = np.empty(self.num_tokens, np.int64)
        cu_seqlens = [0]
        for source, length, ends_here in self._segments(sample_id):
            at, end = cu_seqlens[-1], cu_seqlens[-1] + length
            num_next = length - ends_here
            ids_T[at:end] = self._tokens_N[source : source + length]
            targets_T[at : at + num_next] = self._tokens_N[source + 1 : source + 1 + num_next]
            positions_T[at:end] = np.arange(length)
            cu_seqlens.append(end)
        return MicroBatch(
            sample_id=sample_id,
            input_ids_T=upload(torch.as_tensor(ids_T), device),
            targets_T=upload(torch.as_tensor(targets_T), device),
            position_ids_T=upload(torch.as_tensor(positions_T), device),
            cu_seqlens=tuple(cu_seqlens),
            num_targets=self.num_targets(sample_id),
        )

    def _segments(self, sample_id: int) -> Iterator[tuple[int, int, bool]]:
        """Pieces of documents in the window: place in the dataset, length, ends its document."""
        at, window_end = sample_id * self.num_tokens, (sample_id + 1) * self.num_tokens
        document = int(np.searchsorted(self._bounds, at, side="right")) - 1
        while at < window_end:
            begin, end = int(self._bounds[document]), int(self._bounds[document + 1])
            length = min(end, window_end) - at
            yield int(self._starts[document]) + at - begin, length, end <= window_end
            at += length
            document += 1
