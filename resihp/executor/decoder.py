"""The forward of a run of decoder layers, with the weight gradients deferred.

LLaMA (Touvron et al. 2023) and Qwen2.5 (Yang et al. 2024): pre-norm residual blocks of
grouped-query attention with rotary positions, then a SwiGLU feed-forward; a final norm and a
head. Where a projection has a bias, the parameters hold one. Inside a TP group, q, k, v, gate and
up are column-parallel, o and down row-parallel, both tables cut by rows, norms and the biases of
row-parallel ones replicated. A member has the key/value heads of its query heads; where there are
fewer of them than members, several members hold the same one.

Shapes: T tokens of a micro-batch, D hidden size, V rows of a table, F feed-forward width and H
query, K key/value heads on this member, E head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resihp.executor.attention import document_attention
from resihp.executor.blocks import FeedForward, Projections, feed_forward, project
from resihp.executor.layers import Affine, Bias, Norm, linear, rms_norm
from resihp.executor.layouts import shard_units
from resihp.executor.llama import EMBEDDING, FINAL_NORM, HEAD, LlamaConfig, head_dim, layer_prefix
from resihp.executor.packing import MicroBatch
from resihp.executor.rope import rope_of, rope_table
from resihp.executor.tp import TensorParallel, enter_column_parallel
from resihp.executor.vocabulary import cross_entropy, embed
from resihp.executor.weight_grads import EmbeddingEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from resihp.executor.weight_grads import WeightGradStore

__all__ = ["Decoder"]


class _Layer(NamedTuple):
    """Weights of one layer, in the order in which they are used."""

    projections: Projections
    output: Affine
    feed_forward: FeedForward


class Decoder:
    """Layers `first .. last` on one member of a TP group; holds no state of a micro-batch."""

    def __init__(
        self,
        config: LlamaConfig,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        attention: str = "documents",
    ) -> None:
        """`attention` is one of `attention.FORMS`."""
        self._config = config
        self._tp = tp
        self._parameters = parameters
        self._layers = [self._layer(layer) for layer in range(first, last + 1)]
        self._attention_form = attention
        device = next(iter(parameters.values())).device
        self._rope = rope_of(head_dim(config), config.rope_theta, config.rope_scaling).on(device)
        self._first_row, _ = shard_units(config.vocab_size, tp.degree, tp.index)

    def embed(self, batch: MicroBatch) -> Tensor:
        """Rows of the embedding, shape (T, D); no autograd reaches the table."""
        return embed(batch.input_ids_T, self._parameters[EMBEDDING], self._first_row, self._tp)

    def embedding_entry(self, batch: MicroBatch, dx_TD: Tensor) -> EmbeddingEntry:
        """What W needs for the gradient of the embedding."""
        num_rows = len(self._parameters[EMBEDDING])
        return EmbeddingEntry(EMBEDDING, batch.input_ids_T, dx_TD, self._first_row, num_rows)

    def hidden(self, x_TD: Tensor, batch: MicroBatch, store: WeightGradStore) -> Tensor:
        """Output of the last of the layers, shape (T, D)."""
        rope = rope_table(batch.position_ids_T, self._rope)
        for layer in self._layers:
            q_THE, k_TKE, v_TKE = project(x_TD, rope, layer.projections, store, self._tp)
            mixed_THE = document_attention(
                q_THE, k_TKE, v_TKE, batch.cu_seqlens, self._attention_form
            )
            x_TD = linear(
                mixed_THE.flatten(1), layer.output, store, row_parallel=self._tp, residual_TO=x_TD
            )
            x_TD = feed_forward(x_TD, layer.feed_forward, store, self._tp)
        return x_TD

    def token_losses(self, x_TD: Tensor, batch: MicroBatch, store: WeightGradStore) -> Tensor:
        """Cross-entropy of each next token in nats, shape (T,); 0 where there is no target."""
        logits_TV = self.logits(x_TD, store)
        return cross_entropy(logits_TV, batch.targets_T, self._first_row, self._tp)

    def logits(self, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        """Logits of this member's rows of the head, shape (T, V), from the last layer's output."""
        normed_TD = rms_norm(x_TD, self._norm(FINAL_NORM), store)
        normed_TD = enter_column_parallel(normed_TD, self._tp)
        return linear(normed_TD, Affine(HEAD, self._parameters[HEAD]), store)

    def _layer(self, layer: int) -> _Layer:
        prefix = layer_prefix(layer)
        return _Layer(
            Projections(
                self._norm(prefix + "input_layernorm.weight"),
                self._affine(prefix + "self_attn.q_proj"),
                self._affine(prefix + "self_attn.k_proj"),
                self._affine(prefix + "self_attn.v_proj"),
                head_dim(self._config),
            ),
            self._affine(prefix + "self_attn.o_proj"),
            FeedForward(
                self._norm(prefix + "post_attention_layernorm.weight"),
                self._affine(prefix + "mlp.gate_proj"),
                self._affine(prefix + "mlp.up_proj"),
                self._affine(prefix + "mlp.down_proj"),
            ),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(name, self._parameters[name], self._config.rms_norm_eps)

    def _affine(self, module: str) -> Affine:
        weight, bias = f"{module}.weight", f"{module}.bias"
        found = self._parameters.get(bias)
        return Affine(
            weight, self._parameters[weight], None if found is None else Bias(bias, found)
        )
