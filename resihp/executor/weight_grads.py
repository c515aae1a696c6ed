"""What B leaves for W: the operands of every weight gradient of one micro-batch.

Weights are no autograd leaves. The backward of a layer computes the gradient of its input only
and pushes an entry here; `WeightGradStore` turns the entries into weight gradients later, new
tensors or added to sums, and lets each entry go as soon as it is used (the B/W split of
zero-bubble pipelines, Qi et al. 2024).

Shapes: T tokens of a micro-batch, D hidden size, I inputs and O outputs of a linear, V rows
of the embedding on this member.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from resihp.executor.precision import wide

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BiasEntry",
    "EmbeddingEntry",
    "LinearEntry",
    "NormEntry",
    "WeightGradEntry",
    "WeightGradStore",
]


class WeightGradEntry(Protocol):
    """Operands of the gradient of the weight called `name`."""

    @property
    def name(self) -> str:
        """Name of the weight."""
        ...

    def compute(self) -> Tensor:
        """The gradient of the weight, a new tensor of the weight's local shape, at least fp32."""
        ...

    def add_to(self, total: Tensor, /) -> None:
        """Add the gradient to `total`, which is at least fp32."""
        ...


class LinearEntry(NamedTuple):
    """y = x Wᵀ: dW is dyᵀ x."""

    name: str
    x_TI: Tensor
    dy_TO: Tensor

    def compute(self) -> Tensor:
        """dW, shape (O, I)."""
        return wide(self.dy_TO.t() @ self.x_TI)

    def add_to(self, total_OI: Tensor, /) -> None:
        """Without a pass over the weight of its own where the types allow."""
        if total_OI.dtype == self.x_TI.dtype:
            total_OI.addmm_(self.dy_TO.t(), self.x_TI)
        else:
            total_OI.add_(self.dy_TO.t() @ self.x_TI)


class BiasEntry(NamedTuple):
    """y = x Wᵀ + b: db is the sum of dy over all dims but the last, the tokens mostly."""

    name: str
    dy: Tensor

    def compute(self) -> Tensor:
        """db, shape (O,)."""
        dy, outer = wide(self.dy), tuple(range(self.dy.dim() - 1))
        return dy.sum(outer) if outer else dy.clone()

    def add_to(self, total_O: Tensor, /) -> None:
        """See `WeightGradEntry`."""
        total_O.add_(self.compute())


class NormEntry(NamedTuple):
    """y = x r w with r the reciprocal root mean square: dw is the sum over tokens of dy x r."""

    name: str
    x_TD: Tensor
    rrms_T1: Tensor
    dy_TD: Tensor

    def compute(self) -> Tensor:
        """dw, shape (D,)."""
        return (wide(self.x_TD) * self.rrms_T1).mul_(self.dy_TD).sum(0)

    def add_to(self, total_D: Tensor, /) -> None:
        """See `WeightGradEntry`."""
        total_D.add_(self.compute())


class EmbeddingEntry(NamedTuple):
    """x = E[ids]: dE gathers the rows of dx by token, of the tokens whose rows are here."""

    name: str
    input_ids_T: Tensor
    dx_TD: Tensor
    first_row: int
    num_rows: int

    def compute(self) -> Tensor:
        """dE, shape (V, D) with V rows from `first_row` on."""
        dx_TD, rows_T = wide(self.dx_TD), self._rows()
        # One row more takes what belongs elsewhere: selecting tokens would wait for the device.
        grad_VD = dx_TD.new_zeros(self.num_rows + 1, dx_TD.shape[1])
        grad_VD.index_add_(0, rows_T.where(self._are_here(rows_T), self.num_rows), dx_TD)
        return grad_VD[: self.num_rows]

    def add_to(self, total_VD: Tensor, /) -> None:
        """Touches the rows of the tokens only; what belongs elsewhere adds zeros to any row."""
        rows_T = self._rows()
        are_here_T = self._are_here(rows_T)
        dx_TD = self.dx_TD.to(total_VD.dtype).masked_fill(~are_here_T[:, None], 0.0)
        total_VD.index_add_(0, rows_T.clamp_(0, self.num_rows - 1), dx_TD)

    def _rows(self) -> Tensor:
        return self.input_ids_T - self.first_row

    def _are_here(self, rows_T: Tensor) -> Tensor:
        return (rows_T >= 0) & (rows_T < self.num_rows)


class WeightGradStore:
    """Entries of one micro-batch on one stage, in the order in which B reached the layers."""

    def __init__(self) -> None:
        self._entries: deque[WeightGradEntry] = deque()

    def push(self, entry: WeightGradEntry) -> None:
        """Keep `entry` until W."""
        self._entries.append(entry)

    def compute(self) -> dict[str, Tensor]:
        """Weight gradients by name; the store is empty afterwards.

        A weight used more than once gets the sum over its uses, added in the order in which B
        reached them, as autograd adds.
        """
        grads: dict[str, Tensor] = {}
        with torch.no_grad():
            while self._entries:
                entry = self._entries.popleft()
                grad, earlier = entry.compute(), grads.get(entry.name)
                grads[entry.name] = grad if earlier is None else earlier.add_(grad)
        return grads

    def add_to(self, sums: Mapping[str, Tensor]) -> None:
        """Add all weight gradients to the sums of their names; the store is empty afterwards."""
        with torch.no_grad():
            while self._entries:
                entry = self._entries.popleft()
                entry.add_to(sums[entry.name])
