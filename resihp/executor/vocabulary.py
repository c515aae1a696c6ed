"""Tables of the vocabulary cut by rows over a TP group, and the loss of logits cut the same way.

Each member holds a run of rows of the embedding and of the head, and so a run of columns of the
logits. An embedded token is a row of one member and zeros of the others, so their sum is exact.
For the loss every member needs of each other three numbers a token: the maximum of its logits, the
sum of their exponentials, and the logit of the target if it is its own (Megatron-LM, Shoeybi et
al. 2019, section 3). They travel in one sum of a buffer in which each member fills its own row,
and are added in member order, so that all get the same bits.

Shapes: T tokens of a micro-batch, D hidden size, V rows of a table on this member, M members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from resihp.executor.function import apply
from resihp.executor.packing import IGNORED_TARGET
from resihp.executor.precision import wide

if TYPE_CHECKING:
    from resihp.executor.tp import TensorParallel

__all__ = ["cross_entropy", "embed"]


def embed(ids_T: Tensor, table_VD: Tensor, first_row: int, tp: TensorParallel) -> Tensor:
    """Rows of the whole table, shape (T, D); `table_VD` begins with its row `first_row`."""
    if tp.degree == 1:
        return nnf.embedding(ids_T, table_VD)
    rows_T, owned_T = _rows(ids_T, first_row, len(table_VD))
    x_TD = nnf.embedding(rows_T, table_VD).masked_fill_(~owned_T[:, None], 0.0)
    tp.all_reduce_(x_TD)
    return x_TD


def _rows(ids_T: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Local row of each id, any valid one where it lies elsewhere; whether it lies here."""
    rows_T = ids_T - first_row
    owned_T = (rows_T >= 0) & (rows_T < num_rows)
    return rows_T.clamp_(0, num_rows - 1), owned_T


def cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, first_row: int, tp: TensorParallel
) -> Tensor:
    """Cross-entropy in nats, shape (T,), at least fp32; 0 where the target is `IGNORED_TARGET`.

    `logits_TV` are those of the rows of the head from `first_row` on.
    """
    if tp.degree == 1:
        return nnf.cross_entropy(
            wide(logits_TV), targets_T, ignore_index=IGNORED_TARGET, reduction="none"
        )
    return apply(_ShardedCrossEntropy, logits_TV, targets_T, first_row, tp)


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, first_row: int, tp: TensorParallel
    ) -> Tensor:
        # An ignored target is a negative number: no member's row.
        rows_T, owned_T = _rows(targets_T, first_row, logits_TV.shape[1])
        wide_TV = wide(logits_TV)
        max_T = wide_TV.amax(-1)
        exp_TV = (wide_TV - max_T[:, None]).exp_()
        target_T = wide_TV.gather(1, rows_T[:, None])[:, 0].masked_fill_(~owned_T, 0.0)
        parts_M3T = max_T.new_zeros(tp.degree, 3, len(max_T))
        torch.stack((max_T, exp_TV.sum(-1), target_T), out=parts_M3T[tp.index])
        tp.all_reduce_(parts_M3T)
        maxima_MT, sums_MT, targets_MT = parts_M3T.unbind(1)
        top_T = maxima_MT.amax(0)
        total_T = (sums_MT * (maxima_MT - top_T).exp_()).sum(0)
        ctx.save_for_backward(exp_TV, (max_T - top_T).exp_().div_(total_T), targets_T)
        ctx.first_row, ctx.dtype = first_row, logits_TV.dtype
        losses_T = total_T.log() + top_T - targets_MT.sum(0)
        return losses_T.masked_fill_(targets_T == IGNORED_TARGET, 0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (dlosses_T,) = cast("tuple[Tensor]", grad_outputs)
        exp_TV, scale_T, targets_T = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        rows_T, owned_T = _rows(targets_T, ctx.first_row, exp_TV.shape[1])
        dlosses_T = dlosses_T.masked_fill(targets_T == IGNORED_TARGET, 0.0)
        dlogits_TV = exp_TV * (scale_T * dlosses_T)[:, None]
        dlogits_TV.scatter_add_(1, rows_T[:, None], (dlosses_T * owned_T).neg_()[:, None])
        return dlogits_TV.to(ctx.dtype), None, None, None
