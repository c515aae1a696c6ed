"""Descriptions of models: what they are made of, and what that costs in parameters and FLOPs.

All are decoders with grouped-query attention, RMS norms and a gated feed-forward network (LLaMA
and its relatives). Symbols: h hidden size, H query heads, K key/value heads, e = h / H channels of
a head, f feed-forward size, V vocabulary.

FLOPs count a multiplication and an addition as two. Block-diagonal causal attention over documents
of l_1 .. l_k tokens does half of the square of each: 2 h sum(l^2) forward (two products of
l x l x h, half of each masked).
"""

from __future__ import annotations

import difflib

import msgspec

from resihp.compiler.facts import sharded_parameters
from resihp.errors import UserError
from resihp.ir.model import ModelShape

__all__ = [
    "MODELS",
    "LayerFlops",
    "Model",
    "find_model",
    "head_flops_per_token",
    "layer_flops",
    "training_flops",
]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model and what its shape does not say."""

    shape: ModelShape
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases (Qwen2.5)."""
    tied_embeddings: bool = False
    """Whether the head uses the embedding's table."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        shape = self.shape
        width = shape.hidden // shape.heads
        biases = (shape.heads + 2 * shape.kv_heads) * width if self.qkv_bias else 0
        return sharded_parameters(shape, 1) + biases + 2 * shape.hidden

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and as many again of an untied head."""
        return self.shape.vocab * self.shape.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied table once."""
        tables = 1 if self.tied_embeddings else 2
        layers = self.shape.layers * self.layer_parameters
        return layers + tables * self.table_parameters + self.shape.hidden


class LayerFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one decoder layer on one micro-batch.

    W has no attention term: its products are those of the linear layers alone.
    """

    linear_per_token: float
    """Of F, and as much of B, and as much of W."""
    attention_per_pair: float
    """Of F, per unit of sum(l^2)."""
    attention_backward_per_pair: float
    """Of B: the scores again, then four products."""


def layer_flops(model: Model) -> LayerFlops:
    """FLOPs of one layer of `model` on one device of TP degree 1."""
    shape = model.shape
    width = shape.hidden // shape.heads
    pairs = 2 * shape.heads * width
    return LayerFlops(
        linear_per_token=2 * sharded_parameters(shape, 1),
        attention_per_pair=pairs,
        attention_backward_per_pair=2.5 * pairs,
    )


def head_flops_per_token(model: Model) -> float:
    """Of the language-model head's F, and as much of its B and of its W."""
    return 2.0 * model.table_parameters


def training_flops(model: Model, tokens: int, pairs: int) -> float:
    """FLOPs that one micro-batch needs for F, B and W, nothing computed twice.

    `tokens` are those of the micro-batch and `pairs` the sum of its squared document lengths.
    """
    layer = layer_flops(model)
    linear = 3 * layer.linear_per_token * tokens
    attention = 3 * layer.attention_per_pair * pairs
    head = 3 * head_flops_per_token(model) * tokens
    return model.shape.layers * (linear + attention) + head


def _model(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Model:
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
    )
    return Model(shape=shape, qkv_bias=name.startswith("qwen"))


MODELS = {
    model.shape.name: model
    for model in (
        _model("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _model("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _model("llama2-34b", 48, 8192, 64, 8, 22016, 32000),
        _model("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _model("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
        _model("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064),
        _model("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
        _model("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
    )
}
"""By name. `llama2-34b` is the shape of that size, whose weights were never released as LLaMA 2."""

_NO_30B = "there is no LLaMA 2 of 30B; llama2-34b is the shape nearest to it"
_UNKNOWN = {"llama2-30b": _NO_30B, "llama2-33b": _NO_30B}


def find_model(name: str) -> Model:
    """The model called `name`. Raises UserError with the nearest names."""
    lowered = name.lower()
    if lowered in MODELS:
        return MODELS[lowered]
    close = difflib.get_close_matches(lowered, MODELS, n=1, cutoff=0.5)
    advice = _UNKNOWN.get(lowered) or (f"did you mean {close[0]}?" if close else "")
    hint = f"; {advice}" if advice else ""
    raise UserError(f"model {name!r} is none of {', '.join(MODELS)}{hint}")
