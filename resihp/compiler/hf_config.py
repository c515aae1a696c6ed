"""A model from the `config.json` of the Hugging Face format.

Only what decides sizes is read. What this family of models does not have (experts, other attention,
head sizes that are not hidden / heads) is refused by name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from resihp.compiler.models import Model
from resihp.errors import UserError
from resihp.ir.model import ModelShape

__all__ = ["MAX_CONFIG_BYTES", "model_of_config"]

MAX_CONFIG_BYTES = 1 << 20
_FAMILIES = ("llama", "mistral", "qwen2")

Count = Annotated[int, Meta(ge=1, le=1 << 30)]


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    head_dim: Count | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False


def model_of_config(data: bytes, *, name: str, path: str) -> Model:
    """The model that a `config.json` describes, called `name`; `path` names the file in errors.

    Raises UserError when the file is not such a config or describes another kind of model.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise UserError(f"{path}: longer than {MAX_CONFIG_BYTES} bytes; this is no model's config")
    try:
        config = msgspec.json.decode(data, type=_Config)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a model's config.json: {error}") from None
    if config.model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(f"{path}: model_type {config.model_type!r} is none of {known}")
    if config.use_sliding_window:
        raise UserError(f"{path}: use_sliding_window = true; such models are not described yet")
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = config.num_key_value_heads or heads
    if hidden % heads or heads % kv_heads:
        raise UserError(
            f"{path}: {hidden} channels, {heads} heads and {kv_heads} key/value heads do not divide"
        )
    if config.head_dim not in (None, hidden // heads):
        raise UserError(
            f"{path}: head_dim {config.head_dim} is not hidden_size / num_attention_heads = "
            f"{hidden // heads}; such models are not described yet"
        )
    return Model(
        shape=ModelShape(
            name=name,
            layers=config.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
        ),
        qkv_bias=config.attention_bias or config.model_type == "qwen2",
        tied_embeddings=config.tie_word_embeddings,
    )
