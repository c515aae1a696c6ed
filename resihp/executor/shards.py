"""Names, shapes and shards of the model's tensors under tensor parallelism.

A logical tensor is the whole one of the Hugging Face checkpoint. At TP degree k, member i holds
shard i of k along the tensor's shard dim, or the whole tensor where there is none. Everything
that moves between layouts moves in chunks: chunk c of N, with N a power of two and at least the
degree, so that every chunk lies inside one shard of any layout with degree ≤ N.

q, k and v are cut by rows, and heads are contiguous rows: chunks that are multiples of a head
(N divides the key/value heads) keep heads whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resihp.executor.llama import LlamaConfig, head_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "holds",
    "layer_of",
    "layer_prefix",
    "local_shape",
    "local_shard",
    "logical_shape",
    "shard_dim",
    "slice_of",
    "tensor_names",
]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_SHARD_DIM: dict[str, int | None] = {
    "input_layernorm.weight": None,
    "self_attn.q_proj.weight": 0,
    "self_attn.k_proj.weight": 0,
    "self_attn.v_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "post_attention_layernorm.weight": None,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
}


def layer_prefix(layer: int) -> str:
    """What the names of a decoder layer's tensors begin with."""
    return f"model.layers.{layer}."


def _split(name: str) -> tuple[int, str]:
    """Layer and the name inside it, of a decoder layer's tensor."""
    _, _, layer, rest = name.split(".", 3)
    return int(layer), rest


def tensor_names(config: LlamaConfig, first: int, last: int) -> list[str]:
    """Tensors of layers `first .. last` inclusive, in model order.

    The embedding goes with layer 0, the final norm and the head with the last layer.
    """
    names = [EMBEDDING] if first == 0 else []
    for layer in range(first, last + 1):
        names += [layer_prefix(layer) + rest for rest in _SHARD_DIM]
    if last == config.num_hidden_layers - 1:
        names += [FINAL_NORM, HEAD]
    return names


def layer_of(config: LlamaConfig, name: str) -> int:
    """The decoder layer that the tensor moves with."""
    if name == EMBEDDING:
        return 0
    if name in (FINAL_NORM, HEAD):
        return config.num_hidden_layers - 1
    return _split(name)[0]


def shard_dim(name: str) -> int | None:
    """The dim that a TP group cuts: 0 column-parallel, 1 row-parallel, None replicated."""
    if name in (EMBEDDING, FINAL_NORM, HEAD):
        return None
    return _SHARD_DIM[_split(name)[1]]


def logical_shape(config: LlamaConfig, name: str) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    if name in (EMBEDDING, HEAD):
        return (config.vocab_size, hidden)
    if name.endswith("norm.weight"):
        return (hidden,)
    kv_width = config.num_key_value_heads * head_dim(config)
    shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    return shapes[_split(name)[1]]


def local_shape(config: LlamaConfig, name: str, degree: int) -> tuple[int, ...]:
    """Shape of one member's shard at TP degree `degree`."""
    shape = list(logical_shape(config, name))
    dim = shard_dim(name)
    if dim is not None:
        assert shape[dim] % degree == 0, f"{name}: {shape[dim]} does not split into {degree}"
        shape[dim] //= degree
    return tuple(shape)


def holds(name: str, chunk: int, num_chunks: int, degree: int, index: int) -> bool:
    """Whether member `index` of `degree` holds chunk `chunk`; of a replicated tensor all do."""
    return shard_dim(name) is None or chunk * degree // num_chunks == index


def slice_of(
    name: str, tensor: Tensor, chunk: int, num_chunks: int, degree: int = 1, index: int = 0
) -> Tensor:
    """Chunk `chunk` of `num_chunks` of the logical tensor, as a view of member `index`'s shard.

    `tensor` is the shard at `degree` (1: the whole tensor) and the member must hold the chunk.
    A replicated tensor is cut along dim 0 into near-equal runs, of which some may be empty.
    """
    assert 0 <= chunk < num_chunks, f"chunk {chunk} of {num_chunks}"
    assert holds(name, chunk, num_chunks, degree, index), f"{name}: not on member {index}"
    dim = shard_dim(name)
    if dim is None:
        size = tensor.shape[0]
        start, end = chunk * size // num_chunks, (chunk + 1) * size // num_chunks
        return tensor.narrow(0, start, end - start)
    assert num_chunks % degree == 0, f"{num_chunks} chunks over {degree} shards"
    chunks_here = num_chunks // degree
    size = tensor.shape[dim]
    assert size % chunks_here == 0, f"{name}: {size} does not split into {chunks_here}"
    length = size // chunks_here
    return tensor.narrow(dim, (chunk - index * chunks_here) * length, length)


def local_shard(name: str, full: Tensor, degree: int, index: int) -> Tensor:
    """Member `index`'s own contiguous copy of its shard of the whole tensor."""
    part = full if shard_dim(name) is None else slice_of(name, full, index, degree)
    return part.clone(memory_format=torch.contiguous_format)
