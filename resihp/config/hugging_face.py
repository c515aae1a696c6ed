"""`[model]` from the `config.json` of a Hugging Face checkpoint.

What decides how the model computes is read, everything else in the file is ignored. What the
runtime does not compute (other activations, windowed attention, other head sizes, dropout) is
refused by name: such a model must not train as another one.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from resihp.errors import ConfigError

__all__ = ["MAX_CONFIG_BYTES", "model_table"]

MAX_CONFIG_BYTES = 1 << 20
_SAME = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_ROPE_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


_KINDS = ("llama", "qwen2")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class _Kind(msgspec.Struct, frozen=True):
    model_type: str


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the file; a default is what Hugging Face takes where the key is missing."""

    model_type: Literal["llama", "qwen2"]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """The spelling of newer files: the scaling and `rope_theta` in one table."""
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    attention_dropout: float = 0.0


class _Refused(NamedTuple):
    key: str
    value: object
    only: object


def model_table(data: bytes, path: str) -> dict[str, object]:
    """The keys of `[model]` that a `config.json` says; `path` names the file in errors.

    Raises ConfigError where it is none, or describes a model that is not computed here.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path}: longer than {MAX_CONFIG_BYTES} bytes; this is no model's config.json"
        )
    file = _decoded(data, path)
    for refused in _refusals(file):
        raise ConfigError(
            f"{path}: {refused.key} = {refused.value!r} is not computed here; "
            f"only {refused.only!r} is"
        )
    table: dict[str, object] = {key: getattr(file, key) for key in _SAME}
    table |= {
        "num_key_value_heads": file.num_key_value_heads or file.num_attention_heads,
        "rms_norm_eps": file.rms_norm_eps,
        "initializer_range": file.initializer_range,
        "tie_word_embeddings": file.tie_word_embeddings,
    }
    if file.model_type == "llama":
        table["attention_bias"] = file.attention_bias
    return table | _rope(file, path)


def _decoded(data: bytes, path: str) -> _File:
    this = f"{path}: not the config.json of a llama or qwen2"
    try:
        kind = msgspec.json.decode(data, type=_Kind).model_type
        if kind not in _KINDS:
            known = " or ".join(f'"{known}"' for known in _KINDS)
            raise ConfigError(f'{this}: model_type = "{kind}": must be {known}')
        return msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        what = what[:1].lower() + what[1:]
        raise ConfigError(f"{this}: {f'{where}: ' if where else ''}{what}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{this}: no JSON: {error}") from None


def _refusals(file: _File) -> list[_Refused]:
    width = file.hidden_size // max(file.num_attention_heads, 1)
    found = [
        _Refused("hidden_act", file.hidden_act, "silu"),
        _Refused("mlp_bias", file.mlp_bias, False),
        _Refused("use_sliding_window", file.use_sliding_window, False),
        _Refused("attention_dropout", file.attention_dropout, 0.0),
        _Refused("head_dim", file.head_dim or width, width),
    ]
    return [refused for refused in found if refused.value != refused.only]


def _rope(file: _File, path: str) -> dict[str, object]:
    """`rope_theta` and `rope_scaling`, of either spelling."""
    said = dict(file.rope_parameters or file.rope_scaling or {})
    theta = said.pop("rope_theta", file.rope_theta)
    # Older files call the kind `type`; newer ones may have both.
    older = said.pop("type", "default")
    kind = said.pop("rope_type", older)
    table: dict[str, object] = {"rope_theta": theta}
    if kind == "default":
        return table
    if kind not in _ROPE_KINDS:
        known = " or ".join(f'"{known}"' for known in _ROPE_KINDS)
        raise ConfigError(f'{path}: rope_scaling: rope_type = "{kind}": must be {known}')
    for key, value in said.items():
        if key not in _ROPE_KEYS and (key, value) != ("truncate", True):
            raise ConfigError(f"{path}: rope_scaling has {key} = {value!r}, which is not read here")
    if kind in ("llama3", "yarn"):
        said.setdefault("original_max_position_embeddings", file.max_position_embeddings)
    said = {key: value for key, value in said.items() if key in _ROPE_KEYS and value is not None}
    return table | {"rope_scaling": {"rope_type": kind, **said}}
