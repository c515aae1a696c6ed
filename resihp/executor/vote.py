"""The vote at the end of an iteration: one exchange among all members, without the coordinator.

A rank contributes once its own reduced gradients are complete, and steps only when it holds
everybody's contribution (DESIGN §6). The same exchange carries the squared norms for gradient
clipping and the losses and sample ids, so that every member knows the whole record of the step.

A contribution is one fp64 row: [finite, what it asks for, steps between snapshots, loss of each
micro-batch, sample id of each micro-batch, squared norm of each tensor]. Micro-batches count from
the first of replica 0; a rank fills in what it computed, and leaves sample ids of others at -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resihp.executor.boundary import Ask
from resihp.executor.layouts import TensorLayout, num_copies
from resihp.executor.model import Model

__all__ = [
    "Contribution",
    "Outcome",
    "Voter",
    "counted_here",
    "read_together",
    "squared_norms",
]


class Contribution(NamedTuple):
    """What one rank brings to the vote."""

    finite: bool
    losses: Mapping[int, float]
    """Summed cross-entropy by global number of the micro-batch, on one rank of each last stage."""
    samples: Mapping[int, int]
    """Sample id of the same micro-batches, as they were read."""
    squared_norms: Mapping[str, float]
    """Per tensor, on the ranks that count it (see `counted_here`)."""
    asked: Ask = Ask.NOTHING
    """What the coordinator asked of this rank (see `boundary`)."""
    gap: int = 0
    """How many steps are to lie between its snapshots, as it sees it; 0: it has none."""


class Outcome(NamedTuple):
    """What all ranks know after the vote."""

    finite: bool
    loss_sum: float
    samples: tuple[int, ...]
    grad_norm: float
    asked: Ask = Ask.NOTHING
    """What any of them was asked for."""
    gap: int = 0
    """The largest that any of them brought."""


def squared_norms(reduced: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Squared norm of each shard, summed in fp64; not finite exactly where an element is not."""
    norm_of = cast("Callable[..., Tensor]", cast("Any", torch.linalg).vector_norm)  # untyped
    return {name: norm_of(tensor, dtype=torch.float64).square() for name, tensor in reduced.items()}


def read_together(numbers: Sequence[Tensor]) -> list[float]:
    """fp64 scalars on the host, which waits once for their device."""
    if not numbers:
        return []
    return cast("list[float]", cast("Any", torch.stack(list(numbers))).tolist())


def counted_here(model: Model, names: Iterable[str], degree: int, index: int) -> frozenset[str]:
    """The tensors whose shards member `index` of `degree` counts in the norm of the gradient.

    Each logical element counts once: of copies the first one, of a replicated tensor the first
    member's, of a tied pair the input side. One replica of a stage counts, the others do not.
    """
    outputs = {output for _, output in model.tied}
    return frozenset(
        name
        for name in names
        if name not in outputs and index % _num_equal(model.layout(name), degree) == 0
    )


def _num_equal(layout: TensorLayout, degree: int) -> int:
    """Neighbours that hold the same."""
    return degree if layout.dim is None else num_copies(layout, degree)


class Voter:
    """Packs, exchanges and adds up contributions of one generation."""

    def __init__(self, names: Sequence[str], num_microbatches: int) -> None:
        """`names` are those of all tensors of the model, `num_microbatches` of the global batch."""
        self._names = sorted(names)
        self._num = num_microbatches

    def pack(self, contribution: Contribution) -> Tensor:
        """One row, fp64."""
        losses, samples = contribution.losses, contribution.samples
        norms = contribution.squared_norms
        row = [float(contribution.finite), float(contribution.asked), float(contribution.gap)]
        row += [losses.get(number, 0.0) for number in range(self._num)]
        row += [float(samples.get(number, -1)) for number in range(self._num)]
        row += [norms.get(name, 0.0) for name in self._names]
        return torch.tensor(row, dtype=torch.float64)

    def count(self, rows: Tensor) -> Outcome:
        """The outcome from the rows [ranks, row] of all members; the same bits on every rank.

        Losses are added in order of micro-batch, squared norms in order of name and then rank.
        """
        table: NDArray[np.float64] = rows.cpu().numpy()
        bounds = np.cumsum([1, 1, 1, self._num, self._num])
        finite, asked, gaps, losses, samples, norms = np.split(table, bounds, axis=1)
        known = (samples >= 0).sum(axis=0)
        for number in np.flatnonzero(known != 1)[:1]:
            raise AssertionError(f"{known[number]} ranks brought the loss of one micro-batch")
        return Outcome(
            finite=bool((finite > 0).all()),
            loss_sum=_sum_in_order(losses.sum(axis=0)),  # all but one of a column are zero
            samples=tuple(samples.max(axis=0).astype(np.int64).tolist()),
            grad_norm=math.sqrt(_sum_in_order(norms.T.reshape(-1))),
            asked=Ask(int(np.bitwise_or.reduce(asked.astype(np.int64), axis=None))),
            gap=int(gaps.max()),
        )


def _sum_in_order(values: NDArray[np.float64]) -> float:
    """One after the other, from the first; `sum` of numpy adds pairwise."""
    return float(np.add.accumulate(values)[-1]) if len(values) else 0.0
