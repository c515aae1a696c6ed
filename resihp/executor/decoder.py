"""The forward of a run of decoder layers, with the weight gradients deferred.

LLaMA (Touvron et al. 2023): pre-norm residual blocks of grouped-query attention with rotary
positions, then a SwiGLU feed-forward; a final norm and an untied head. Inside a TP group, q, k,
v, gate and up are column-parallel, o and down row-parallel, the rest replicated.

Shapes: T tokens of a micro-batch, D hidden size, V vocabulary, F feed-forward width and H query,
K key/value heads on this member, E head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as nnf

from resihp.executor.attention import document_attention
from resihp.executor.layers import linear, rms_norm, rope_table, rotate, swiglu
from resihp.executor.llama import EMBEDDING, FINAL_NORM, HEAD, LlamaConfig, head_dim, layer_prefix
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.tp import TensorParallel, enter_column_parallel

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
    ) -> None:
        self._config = config
        self._layers = range(first, last + 1)
        self._tp = tp
        self._parameters = parameters

    def embed(self, batch: MicroBatch) -> Tensor:
        """Rows of the embedding, shape (T, D); no autograd reaches the table."""
        return nnf.embedding(batch.input_ids_T, self._parameters[EMBEDDING])

    def hidden(self, x_TD: Tensor, batch: MicroBatch, store: WeightGradStore) -> Tensor:
        """Output of the last of the layers, shape (T, D)."""
        cos_T1e, sin_T1e = rope_table(
            batch.position_ids_T, head_dim(self._config), self._config.rope_theta, x_TD.dtype
        )
        for layer in self._layers:
            prefix = layer_prefix(layer)
            x_TD = x_TD + self._attention(prefix, x_TD, batch, cos_T1e, sin_T1e, store)
            x_TD = x_TD + self._feed_forward(prefix, x_TD, store)
        return x_TD

    def token_losses(self, x_TD: Tensor, batch: MicroBatch, store: WeightGradStore) -> Tensor:
        """Cross-entropy of each next token in nats, shape (T,); 0 where there is no target."""
        normed_TD = self._norm(FINAL_NORM, x_TD, store)
        logits_TV = linear(normed_TD, self._parameters[HEAD], HEAD, store)
        return nnf.cross_entropy(
            logits_TV, batch.targets_T, ignore_index=IGNORED_TARGET, reduction="none"
        )

    def _norm(self, name: str, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        return rms_norm(x_TD, self._parameters[name], name, store, self._config.rms_norm_eps)

    def _linear(self, name: str, x_TI: Tensor, store: WeightGradStore) -> Tensor:
        return linear(x_TI, self._parameters[name], name, store)

    def _row_linear(self, name: str, x_TI: Tensor, store: WeightGradStore) -> Tensor:
        return linear(x_TI, self._parameters[name], name, store, row_parallel=self._tp)

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
            self._linear(f"{prefix}self_attn.{part}_proj.weight", normed_TD, store).view(
                normed_TD.shape[0], -1, width
            )
            for part in "qkv"
        )
        mixed_THE = document_attention(
            rotate(q_THE, cos_T1e, sin_T1e),
            rotate(k_TKE, cos_T1e, sin_T1e),
            v_TKE,
            batch.cu_seqlens,
        )
        return self._row_linear(prefix + "self_attn.o_proj.weight", mixed_THE.flatten(1), store)

    def _feed_forward(self, prefix: str, x_TD: Tensor, store: WeightGradStore) -> Tensor:
        normed_TD = self._norm(prefix + "post_attention_layernorm.weight", x_TD, store)
        normed_TD = enter_column_parallel(normed_TD, self._tp)
        gate_TF = self._linear(prefix + "mlp.gate_proj.weight", normed_TD, store)
        up_TF = self._linear(prefix + "mlp.up_proj.weight", normed_TD, store)
        return self._row_linear(prefix + "mlp.down_proj.weight", swiglu(gate_TF, up_TF), store)
