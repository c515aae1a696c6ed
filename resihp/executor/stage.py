"""One pipeline stage on one member of its TP group: F, B and W of its micro-batches.

Between F and B a micro-batch keeps its autograd graph, between B and W only the operands of its
weight gradients, after W nothing but its loss. A stage that recomputes keeps only its input until
B, which runs F again: the same operations, so the same bits. Weights are plain tensors; the
optimizer changes them in place between iterations.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from resihp.executor.decoder import Decoder
from resihp.executor.function import backward_on_this_thread
from resihp.executor.model import DEFAULT_OPTIONS, StageOptions
from resihp.executor.weight_grads import WeightGradStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from resihp.executor.llama import LlamaConfig
    from resihp.executor.packing import MicroBatch
    from resihp.executor.tp import TensorParallel

__all__ = ["DecoderStage"]


class _Input(NamedTuple):
    """What F reads."""

    batch: MicroBatch
    x_TD: Tensor | None
    loss_scale: float


class _Graph(NamedTuple):
    """What B walks.

    The output is kept as its place in the graph only: its storage belongs to whoever sends it.
    """

    input_TD: Tensor
    output: GradientEdge
    dlosses_T: Tensor | None
    """Gradient of the per-token losses; None before the last stage."""
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
        self._decoder = Decoder(config, first, last, tp, self.parameters, options.attention)
        self._inputs: dict[tuple[int, int], _Input] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._awaiting_weights: dict[tuple[int, int], WeightGradStore] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no micro-batch is between its F and its W."""
        return not self._inputs and not self._awaiting_weights

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
        assert key not in self._inputs, f"{key}: forwarded twice"
        assert key not in self._awaiting_weights, f"{key}: forwarded before its W"
        assert (x_TD is None) == self.has_embedding, f"{key}: wrong kind of input"
        self._inputs[key] = read = _Input(batch, x_TD, loss_scale)
        if self.options.recompute:
            with torch.no_grad():
                output = self._output(read, self._embedded(read), WeightGradStore())
        else:
            output, self._graphs[key] = self._recorded(read)
        if not self.has_head:
            return output.detach().contiguous()
        self._losses[key] = output.detach().double().sum()
        return None

    def _embedded(self, read: _Input) -> Tensor:
        return self._decoder.embed(read.batch) if read.x_TD is None else read.x_TD

    def _output(self, read: _Input, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        """Output of the last layer, shape (T, D), or the losses, shape (T,)."""
        y_TD = self._decoder.hidden(x_TD, read.batch, store)
        return self._decoder.token_losses(y_TD, read.batch, store) if self.has_head else y_TD

    def _recorded(self, read: _Input) -> tuple[Tensor, _Graph]:
        """The output, and the graph that leads to it."""
        store = WeightGradStore()
        input_TD = self._embedded(read).detach().requires_grad_()
        output = self._output(read, input_TD, store)
        scale = read.loss_scale
        dlosses_T = torch.full_like(output, scale, requires_grad=False) if self.has_head else None
        return output, _Graph(input_TD, get_gradient_edge(output), dlosses_T, store)

    def loss_of(self, key: tuple[int, int]) -> Tensor:
        """Summed cross-entropy of a forwarded micro-batch, unscaled, added in fp64; on the device.

        Last stage only. It is known from F until the key is forwarded anew or all is discarded.
        """
        return self._losses[key]

    def backward_input(self, key: tuple[int, int], dy_TD: Tensor | None) -> Tensor | None:
        """B: the gradient for the previous stage, or None on the first.

        `dy_TD` is the gradient of this stage's output, None exactly on the last stage; it is
        kept, unchanged, until W.
        """
        assert (dy_TD is None) == self.has_head, f"{key}: wrong kind of output gradient"
        read = self._inputs.pop(key)
        graph = self._recorded(read)[1] if self.options.recompute else self._graphs.pop(key)
        doutput = graph.dlosses_T if dy_TD is None else dy_TD
        assert doutput is not None
        with backward_on_this_thread():
            (dx_TD,) = torch.autograd.grad((graph.output,), (graph.input_TD,), (doutput,))
        self._awaiting_weights[key] = graph.store
        if not self.has_embedding:
            return dx_TD.contiguous()
        graph.store.push(self._decoder.embedding_entry(read.batch, dx_TD))
        return None

    def backward_weight(self, key: tuple[int, int]) -> dict[str, Tensor]:
        """W: this micro-batch's gradient of every parameter of the stage, of its local shape.

        The tensors are new and the caller's to keep or change.
        """
        grads = self._awaiting_weights.pop(key).compute()
        return {name: grads[name] for name in self.parameters}

    def add_weight_gradients(self, key: tuple[int, int], sums: Mapping[str, Tensor]) -> None:
        """W, added to `sums`, which hold fp32 of every parameter's local shape."""
        self._awaiting_weights.pop(key).add_to(sums)

    def discard_all(self) -> None:
        """Drop everything of every micro-batch, as after an aborted iteration."""
        self._inputs.clear()
        self._graphs.clear()
        self._awaiting_weights.clear()
        self._losses.clear()
