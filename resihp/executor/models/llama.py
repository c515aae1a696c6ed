"""LLaMA and Qwen2.5 as a `Model`: the tensors of their checkpoints, and stages of their decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resihp.executor.keyed_random import keyed_seed
from resihp.executor.layouts import TensorLayout
from resihp.executor.llama import EMBEDDING, FINAL_NORM, HEAD, LlamaConfig, head_dim, layer_prefix
from resihp.executor.model import DEFAULT_OPTIONS, StageOptions, check_parameters
from resihp.executor.stage import DecoderStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from resihp.executor.tp import TensorParallel

__all__ = ["Llama"]


class Llama:
    """A LLaMA decoder, or one of Qwen2.5, with the names of the Hugging Face checkpoint.

    q, k, v, gate and up are cut by rows (whole heads, single columns of the feed-forward), their
    biases too, o and down by columns of the same units, and both tables by rows of the vocabulary;
    the rest is whole on every member. A tied head is a tensor of its own that stays equal to the
    embedding.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.tied = ((EMBEDDING, HEAD),) if config.tie_word_embeddings else ()
        self._of_layer = _layer_layouts(config)
        table = TensorLayout((config.vocab_size, config.hidden_size), 0, config.vocab_size)
        norm = TensorLayout((config.hidden_size,), None, 1)
        self._outside = {EMBEDDING: table, FINAL_NORM: norm, HEAD: table}

    def tensors(self, first: int, last: int) -> list[str]:
        """Tensors of layers `first .. last` inclusive, in model order."""
        names = [EMBEDDING] if first == 0 else []
        for layer in range(first, last + 1):
            names += [layer_prefix(layer) + rest for rest in self._of_layer]
        if last == self.num_layers - 1:
            names += [FINAL_NORM, HEAD]
        return names

    def layer_of(self, name: str) -> int:
        """The decoder layer that the tensor moves with."""
        if name == EMBEDDING:
            return 0
        if name in self._outside:
            return self.num_layers - 1
        return int(name.split(".", 3)[2])

    def layout(self, name: str) -> TensorLayout:
        """Shape of the whole tensor, and where TP cuts it."""
        if name in self._outside:
            return self._outside[name]
        return self._of_layer[name.split(".", 3)[3]]

    def initial(self, name: str, seed: int) -> Tensor:
        """The whole tensor, fp32 on CPU: N(0, initializer_range²), norms one and biases zero."""
        shape = self.layout(name).shape
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        name = EMBEDDING if name == HEAD and self.tied else name
        generator = torch.Generator().manual_seed(keyed_seed("init", seed, name))
        spread = self.config.initializer_range
        return torch.empty(shape).normal_(0.0, spread, generator=generator)

    def stage(
        self,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        options: StageOptions = DEFAULT_OPTIONS,
    ) -> DecoderStage:
        """See `Model`."""
        check_parameters(self, first, last, tp, parameters)
        in_order = {name: parameters[name] for name in self.tensors(first, last)}
        return DecoderStage(self.config, first, last, tp, in_order, options)


def _layer_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Tensors of one decoder layer by the rest of their names, in model order."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = head_dim(config)
    norm = TensorLayout((hidden,), None, 1)
    projections = {
        "q_proj": TensorLayout((heads * width, hidden), 0, heads),
        "k_proj": TensorLayout((kv_heads * width, hidden), 0, kv_heads),
        "v_proj": TensorLayout((kv_heads * width, hidden), 0, kv_heads),
        "o_proj": TensorLayout((hidden, heads * width), 1, heads),
    }
    biased = ["q_proj", "k_proj", "v_proj"] if config.qkv_bias else []
    biased += ["o_proj"] if config.output_bias else []
    attention: dict[str, TensorLayout] = {}
    for module, layout in projections.items():
        attention[f"self_attn.{module}.weight"] = layout
        if module in biased:
            attention[f"self_attn.{module}.bias"] = _bias_of(layout)
    columns = TensorLayout((ffn, hidden), 0, ffn)
    return {
        "input_layernorm.weight": norm,
        **attention,
        "post_attention_layernorm.weight": norm,
        "mlp.gate_proj.weight": columns,
        "mlp.up_proj.weight": columns,
        "mlp.down_proj.weight": TensorLayout((hidden, ffn), 1, ffn),
    }


def _bias_of(weight: TensorLayout) -> TensorLayout:
    """Cut as the rows of its weight are."""
    shape = weight.shape[:1]
    return TensorLayout(shape, 0, weight.units) if weight.dim == 0 else TensorLayout(shape, None, 1)
