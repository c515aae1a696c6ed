"""The forward of a run of decoder layers, with the weight gradients deferred.

LLaMA (Touvron et al. 2023) and Qwen2.5 (Yang et al. 2024): pre-norm residual blocks of
grouped-query attention with rotary positions, then a SwiGLU feed-forward; a final norm and a
head. Where a projection has a bias, the parameters hold one. Inside a TP group, q, k, v, gate and
up are column-parallel, o and down row-parallel, both tables cut by rows, norms and the biases of
row-parallel ones replicated. A member has the key/value heads of its query heads; where there are
fewer of them than members, several members hold the same one.

Shapes: T tokens of a micro-batch, D hidden size, V rows of a table, F feed-forward width and H
query, K key/value heads on this member, E head width, e half of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.executor.attention import document_attention
from resihp.executor.layers import Bias, linear, rms_norm, rotate, swiglu
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
        self._layers = range(first, last + 1)
        self._tp = tp
        self._parameters = parameters
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
        cos_T1e, sin_T1e = rope_table(batch.position_ids_T, self._rope)
        for layer in self._layers:
            prefix = layer_prefix(layer)
            x_TD = x_TD + self._attention(prefix, x_TD, batch, cos_T1e, sin_T1e, store)
            x_TD = x_TD + self._feed_forward(prefix, x_TD, store)
        return x_TD

    def token_losses(self, x_TD: Tensor, batch: MicroBatch, store: WeightGradStore) -> Tensor:
        """Cross-entropy of each next token in nats, shape (T,); 0 where there is no target."""
        logits_TV = self.logits(x_TD, store)
        return cross_entropy(logits_TV, batch.targets_T, self._first_row, self._tp)

    def logits(self, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        """Logits of this member's rows of the head, shape (T, V), from the last layer's output."""
        normed_TD = self._norm(FINAL_NORM, x_TD, store)
        normed_TD = enter_column_parallel(normed_TD, self._tp)
        return linear(normed_TD, self._parameters[HEAD], HEAD, store)

    def _norm(self, name: str, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        return rms_norm(x_TD, self._parameters[name], name, store, self._config.rms_norm_eps)

    def _linear(self, module: str, x_TI: Tensor, store: WeightGradStore) -> Tensor:
        weight, bias = self._weight_and_bias(module)
        return linear(x_TI, weight, f"{module}.weight", store, bias=bias)

    def _row_linear(self, module: str, x_TI: Tensor, store: WeightGradStore) -> Tensor:
        weight, bias = self._weight_and_bias(module)
        name = f"{module}.weight"
        return linear(x_TI, weight, name, store, bias=bias, row_parallel=self._tp)

    def _weight_and_bias(self, module: str) -> tuple[Tensor, Bias | None]:
        bias = self._parameters.get(f"{module}.bias")
        return (
            self._parameters[f"{module}.weight"],
            None if bias is None else Bias(f"{module}.bias", bias),
        )

    def _attention(
        self,
        prefix: str,
        x_TD: Tensor,
        batch: MicroBatch,
        cos_T1e: Tensor,
        sin_T1e: Tensor,
        store: WeightGradStore,
    ) -> Tensor:
        width = head_dim(self._config)
        normed_TD = self._norm(prefix + "input_layernorm.weight", x_TD, store)
        normed_TD = enter_column_parallel(normed_TD, self._tp)
        q_THE, k_TKE, v_TKE = (
            self._linear(f"{prefix}self_attn.{part}_proj", normed_TD, store).view(
                normed_TD.shape[0], -1, width
            )
            for part in "qkv"
        )
        mixed_THE = document_attention(
            rotate(q_THE, cos_T1e, sin_T1e),
            rotate(k_TKE, cos_T1e, sin_T1e),
            v_TKE,
            batch.cu_seqlens,
            self._attention_form,
        )
        return self._row_linear(prefix + "self_attn.o_proj", mixed_THE.flatten(1), store)

    def _feed_forward(self, prefix: str, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        normed_TD = self._norm(prefix + "post_attention_layernorm.weight", x_TD, store)
        normed_TD = enter_column_parallel(normed_TD, self._tp)
        gate_TF = self._linear(prefix + "mlp.gate_proj", normed_TD, store)
        up_TF = self._linear(prefix + "mlp.up_proj", normed_TD, store)
        return self._row_linear(prefix + "mlp.down_proj", swiglu(gate_TF, up_TF), store)
