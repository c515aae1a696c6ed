"""Which tensors a model of the job file has, and how a saved version's differ from them.

The executor makes the same names and shapes, of torch tensors (`resihp.executor.models.llama`).
"""

from __future__ import annotations

from collections.abc import Mapping

from resihp.config import ModelConfig

__all__ = ["model_difference", "saved_shapes"]

Shape = tuple[int, ...]
_KINDS = ("parameters", "exp_avg", "exp_avg_sq")
_LAYERS = "parameters.model.layers."
_EMBEDDING = "parameters.model.embed_tokens.weight"
_GATE = f"{_LAYERS}0.mlp.gate_proj.weight"


def saved_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a version of `model`; a tied head is not saved. Not for a `factory`."""
    hidden, table = model.hidden_size, (model.vocab_size, model.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    for layer in range(model.num_hidden_layers):
        for name, shape in _of_layer(model).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {f"{kind}.{name}": shape for kind in _KINDS for name, shape in shapes.items()}


def _of_layer(model: ModelConfig) -> dict[str, Shape]:
    hidden, ffn = model.hidden_size, model.intermediate_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if model.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if model.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    return shapes


def model_difference(saved: Mapping[str, Shape], model: ModelConfig) -> str:
    """What tells a version with tensors `saved` from one of `model`; '' where nothing does.

    The keys of the job file that can be read off the tensors come first.
    """
    wanted = saved_shapes(model)
    if saved == wanted:
        return ""
    there, here = _sizes(saved), _sizes(wanted)
    for key, size in here.items():
        if there[key] not in (None, size):
            return f"{key} = {there[key]} there, and {size} in this job"
    name = next(
        name for name in sorted(saved.keys() | wanted.keys()) if saved.get(name) != wanted.get(name)
    )
    of_version, of_job = (
        "missing" if shape is None else f"of shape {list(shape)}"
        for shape in (saved.get(name), wanted.get(name))
    )
    return f"{name} is {of_version} there, and {of_job} in this job"


def _sizes(shapes: Mapping[str, Shape]) -> dict[str, int | None]:
    """By their keys in the job file; None where the tensor that says so is not there."""
    table, gate = shapes.get(_EMBEDDING, ()), shapes.get(_GATE, ())
    layers = {name.split(".")[3] for name in shapes if name.startswith(_LAYERS)}
    return {
        "model.hidden_size": table[1] if len(table) == 2 else None,
        "model.vocab_size": table[0] if len(table) == 2 else None,
        "model.num_hidden_layers": len(layers) or None,
        "model.intermediate_size": gate[0] if len(gate) == 2 else None,
    }
