"""One pipeline stage on one member of its TP group: F, B and W of its micro-batches.

Between F and B a micro-batch keeps its autograd graph, between B and W only the operands of its
weight gradients, after W nothing but its loss. Weights are plain tensors; the optimizer changes
them in place between iterations.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from resihp.executor.decoder import Decoder
from resihp.executor.llama import EMBEDDING
from resihp.executor.model import DEFAULT_OPTIONS, StageOptions
from resihp.executor.weight_grads import EmbeddingEntry, WeightGradStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from resihp.executor.llama import LlamaConfig
    from resihp.executor.packing import MicroBatch
    from resihp.executor.tp import TensorParallel

__all__ = ["DecoderStage"]


class _Forwarded(NamedTuple):
    """What F leaves for B.

    The output is kept as its place in the graph only: its storage belongs to whoever sends it.
    """

    input_TD: Tensor
    output: GradientEdge
    dlosses_T: Tensor | None
    """Gradient of the per-token losses; None before the last stage."""
    input_ids_T: Tensor
    store: WeightGradStore


class DecoderStage:
    """Layers `first .. last` inclusive of the model, with this member's shards."""

    def __init__(
        self,
        config: LlamaConfig,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        options: StageOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.parameters = dict(parameters)
        self.options = options
        self.has_embedding = first == 0
        self.has_head = last == config.num_hidden_layers - 1
        self._vocab_size = config.vocab_size
        self._decoder = Decoder(config, first, last, tp, self.parameters)
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self._awaiting_weights: dict[tuple[int, int], WeightGradStore] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no micro-batch is between its F and its W."""
        return not self._forwarded and not self._awaiting_weights

    def forward(
        self,
        key: tuple[int, int],
        batch: MicroBatch,
        x_TD: Tensor | None,
        *,
        loss_scale: float,
    ) -> Tensor | None:
        """F: the activation for the next stage, detached and contiguous, or None on the last.

        `x_TD` is None exactly on the first stage; the stage keeps it, unchanged, until W. On the
        last stage backward differentiates the summed cross-entropy times `loss_scale`, which is
        one over the number of targets of the global batch.
        """
        assert key not in self._forwarded, f"{key}: forwarded twice"
        assert key not in self._awaiting_weights, f"{key}: forwarded before its W"
        assert (x_TD is None) == self.has_embedding, f"{key}: wrong kind of input"
        store = WeightGradStore()
        source_TD = self._decoder.embed(batch) if x_TD is None else x_TD
        input_TD = source_TD.detach().requires_grad_()
        output = self._decoder.hidden(input_TD, batch, store)
        dlosses_T = None
        if self.has_head:
            output = self._decoder.token_losses(output, batch, store)
            dlosses_T = torch.full_like(output, loss_scale, requires_grad=False)
            self._losses[key] = output.detach().double().sum()
        self._forwarded[key] = _Forwarded(
            input_TD, get_gradient_edge(output), dlosses_T, batch.input_ids_T, store
        )
        return None if self.has_head else output.detach().contiguous()

    def loss_of(self, key: tuple[int, int]) -> float:
        """Summed cross-entropy of a forwarded micro-batch, unscaled, added in fp64.

        Last stage only. It is known from F until the key is forwarded anew or all is discarded.
        """
        return float(self._losses[key])

    def backward_input(self, key: tuple[int, int], dy_TD: Tensor | None) -> Tensor | None:
        """B: the gradient for the previous stage, or None on the first.

        `dy_TD` is the gradient of this stage's output, None exactly on the last stage; it is
        kept, unchanged, until W.
        """
        assert (dy_TD is None) == self.has_head, f"{key}: wrong kind of output gradient"
        done = self._forwarded.pop(key)
        doutput = done.dlosses_T if dy_TD is None else dy_TD
        assert doutput is not None
        (dx_TD,) = torch.autograd.grad((done.output,), (done.input_TD,), (doutput,))
        self._awaiting_weights[key] = done.store
        if not self.has_embedding:
            return dx_TD.contiguous()
        done.store.push(EmbeddingEntry(EMBEDDING, done.input_ids_T, dx_TD, self._vocab_size))
        return None

    def backward_weight(self, key: tuple[int, int]) -> dict[str, Tensor]:
        """W: this micro-batch's gradient of every parameter of the stage, of its local shape.

        The tensors are new and the caller's to keep or change.
        """
        grads = self._awaiting_weights.pop(key).compute()
        return {name: grads[name] for name in self.parameters}

    def discard_all(self) -> None:
        """Drop everything of every micro-batch, as after an aborted iteration."""
        self._forwarded.clear()
        self._awaiting_weights.clear()
        self._losses.clear()
