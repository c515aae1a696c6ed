"""A stack of plain LLaMA layers under autograd: what a user writes without ResiHP.

The same formulas and the same attention as the executor's, nothing deferred: weights are leaves.

Shapes: T tokens of a micro-batch, D hidden size, H heads, E head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as nnf
from torch import Tensor

from resihp.executor.attention import document_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resihp.config import ModelConfig
    from resihp.executor.packing import MicroBatch


class PlainStack:
    """Layers `first .. last` with the weights of `parameters`, copied."""

    def __init__(
        self, config: ModelConfig, first: int, last: int, parameters: Mapping[str, Tensor]
    ) -> None:
        self._config = config
        self._layers = range(first, last + 1)
        self._weights = {
            name: p.detach().clone().requires_grad_() for name, p in parameters.items()
        }

    def step(self, x_TD: Tensor, batch: MicroBatch) -> None:
        """Forward and backward; the gradients of the input and of all weights."""
        input_TD = x_TD.detach().requires_grad_()
        angles_TE = self._angles(batch)
        turns = angles_TE.cos().to(x_TD.dtype)[:, None], angles_TE.sin().to(x_TD.dtype)[:, None]
        out_TD = input_TD
        for layer in self._layers:
            out_TD = self._layer(f"model.layers.{layer}.", out_TD, batch, turns)
        out_TD.backward(x_TD)
        for weight in self._weights.values():
            weight.grad = None

    def _angles(self, batch: MicroBatch) -> Tensor:
        width = self._config.head_dim
        halves = torch.arange(0, width, 2, device=batch.position_ids_T.device).float() / width
        frequencies = 1.0 / self._config.rope_theta**halves
        return torch.outer(batch.position_ids_T.float(), frequencies).repeat(1, 2)

    def _layer(
        self, prefix: str, x_TD: Tensor, batch: MicroBatch, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        width = self._config.head_dim
        normed_TD = self._norm(prefix + "input_layernorm.weight", x_TD)
        q, k, v = (
            self._linear(f"{prefix}self_attn.{part}_proj.weight", normed_TD).unflatten(
                1, (-1, width)
            )
            for part in "qkv"
        )
        mixed_THE = document_attention(_turned(q, turns), _turned(k, turns), v, batch.cu_seqlens)
        x_TD = x_TD + self._linear(prefix + "self_attn.o_proj.weight", mixed_THE.flatten(1))
        normed_TD = self._norm(prefix + "post_attention_layernorm.weight", x_TD)
        gate = nnf.silu(self._linear(prefix + "mlp.gate_proj.weight", normed_TD))
        up = self._linear(prefix + "mlp.up_proj.weight", normed_TD)
        return x_TD + self._linear(prefix + "mlp.down_proj.weight", gate * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return nnf.linear(x, self._weights[name])

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        weight = self._weights[name]
        return nnf.rms_norm(x_TD, weight.shape, weight, self._config.rms_norm_eps)


def _turned(x_THE: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * turns[0] + torch.cat((-second, first), dim=-1) * turns[1]
