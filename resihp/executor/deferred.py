"""Split backward for plain modules: which of their weight gradients wait for W, and how.

Linear layers and embedding tables make most of a weight gradient's cost. Their `forward` is
replaced, on the instance, by one whose backward gives the gradient of the input and pushes the
operands of the weight's gradient into the store of the micro-batch. Every other parameter stays
an autograd leaf, whose gradient B computes.

Nothing here looks at the autograd graph. Whatever a module does with the outputs (chunks them,
drops one, recomputes them in a checkpoint), the engine calls a layer's backward once per use,
with the complete gradient of its output; so a weight used twice gets two entries, and W adds them.

Shapes: T rows (tokens), I inputs and O outputs of a linear, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from resihp.executor.function import apply
from resihp.executor.weight_grads import BiasEntry, EmbeddingEntry, LinearEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resihp.executor.weight_grads import WeightGradStore

__all__ = ["CurrentStore", "defer_weight_gradients"]


class CurrentStore:
    """The store of the micro-batch that the stage works on; None between micro-batches.

    A plain attribute, not a thread-local: on CUDA a checkpoint is recomputed on a thread of
    autograd's.
    """

    def __init__(self) -> None:
        self.store: WeightGradStore | None = None


class _Linear(torch.autograd.Function):
    """The weight and the bias are inputs so that the call is recorded whatever x is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_OI: Tensor,
        b_O: Tensor | None,
        names: tuple[str, str | None],
        store: WeightGradStore,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w_OI, ctx.names, ctx.store = w_OI, names, store
        return nnf.linear(x, w_OI, b_O)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy,) = cast("tuple[Tensor]", grad_outputs)
        (x,) = cast("tuple[Tensor]", ctx.saved_tensors)
        weight, bias = cast("tuple[str, str | None]", ctx.names)
        dy_TO = _rows(dy)
        ctx.store.push(LinearEntry(weight, _rows(x.detach()), dy_TO))
        if bias is not None:
            ctx.store.push(BiasEntry(bias, dy))
        dx = (dy_TO @ ctx.w_OI.detach()).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, w_VD: Tensor, name: str, store: WeightGradStore) -> Tensor:
        ctx.ids, ctx.name, ctx.store, ctx.vocab_size = ids, name, store, w_VD.shape[0]
        return nnf.embedding(ids, w_VD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[None, ...]:
        (dy,) = cast("tuple[Tensor]", grad_outputs)
        ids_T = cast("Tensor", ctx.ids).reshape(-1)
        ctx.store.push(EmbeddingEntry(ctx.name, ids_T, _rows(dy), 0, ctx.vocab_size))
        return None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """All dims but the last as one."""
    return x.reshape(-1, x.shape[-1])


def defer_weight_gradients(
    module: nn.Module, names: Mapping[Tensor, str], current: CurrentStore
) -> set[str]:
    """Make `module`'s linear layers and embeddings push to `current`; the names that they push.

    `names` has the parameters to train. Left alone, and right all the same, are layers with a
    frozen or computed parameter, hooks on one, a forward of their own or an unusual embedding.
    """
    deferred: set[str] = set()
    for layer in module.modules():
        own = dict(layer.named_parameters(recurse=False))
        if "weight" not in own or not all(p in names and not _has_hooks(p) for p in own.values()):
            continue
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            _defer_linear(layer, names, current)
        elif isinstance(layer, nn.Embedding) and _is_plain(layer):
            _defer_embedding(layer, names, current)
        else:
            continue
        deferred |= {names[p] for p in own.values()}
    return deferred


def _has_hooks(parameter: Tensor) -> bool:
    """Whether the user waits for autograd to reach the parameter."""
    untyped = cast("Any", parameter)
    return bool(untyped._backward_hooks or untyped._post_accumulate_grad_hooks)


def _is_plain(layer: nn.Embedding) -> bool:
    return (
        type(layer).forward is nn.Embedding.forward
        and layer.padding_idx is None
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
        and not layer.sparse
    )


def _defer_linear(layer: nn.Linear, names: Mapping[Tensor, str], current: CurrentStore) -> None:
    bias = cast("nn.Parameter | None", layer.bias)
    known = names[layer.weight], None if bias is None else names[bias]

    def forward(input: Tensor) -> Tensor:
        if current.store is None or not torch.is_grad_enabled():
            return nnf.linear(input, layer.weight, layer.bias)
        return apply(_Linear, input, layer.weight, layer.bias, known, current.store)

    vars(layer)["forward"] = forward


def _defer_embedding(
    layer: nn.Embedding, names: Mapping[Tensor, str], current: CurrentStore
) -> None:
    known = names[layer.weight]

    def forward(input: Tensor) -> Tensor:
        if current.store is None or not torch.is_grad_enabled():
            return nnf.embedding(input, layer.weight)
        return apply(_Embedding, input, layer.weight, known, current.store)

    vars(layer)["forward"] = forward
