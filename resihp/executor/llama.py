"""The LLaMA architecture as facts: what a decoder's configuration must say, and its names.

Field names are those of a Hugging Face `config.json`, tensor names those of its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from resihp.executor.rope import RopeScaling

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "LlamaConfig", "head_dim", "layer_prefix"]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class LlamaConfig(Protocol):
    """What the executor reads from a model description; `resihp.config.ModelConfig` is one."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers of the whole model."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads per layer."""
        ...

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads per layer; divides the query heads."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the gated feed-forward block."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the language-model head."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Added to the mean square before its root."""
        ...

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        ...

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How the rotary frequencies are stretched."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        ...

    @property
    def output_bias(self) -> bool:
        """Whether the projection of what attention mixed has one."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head uses the embedding's table."""
        ...

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        ...


def head_dim(config: LlamaConfig) -> int:
    """Width of one attention head."""
    return config.hidden_size // config.num_attention_heads


def layer_prefix(layer: int) -> str:
    """What the names of a decoder layer's tensors begin with."""
    return f"model.layers.{layer}."
