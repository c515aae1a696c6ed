"""A plain LLaMA or Qwen2.5 with plain autograd: weights are leaves, backward is one call.

It is the oracle for the stages. Its formulas are written in the order of the textbook; where two
ways are common, in the order that the stages use, so that most comparisons can be bitwise.

Shapes: T tokens, D hidden size, H query and K key/value heads, E head width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as nnf

from resihp.executor.rope import rope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from resihp.executor.llama import LlamaConfig
    from resihp.executor.packing import MicroBatch
    from resihp.executor.rope import Rope


_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def loss_and_grads(
    config: LlamaConfig,
    parameters: Mapping[str, Tensor],
    batch: MicroBatch,
    loss_scale: float,
) -> tuple[float, dict[str, Tensor]]:
    """Summed cross-entropy in fp64, and the gradients of it times `loss_scale`.

    Where tables are tied, `lm_head.weight` is left out of the gradients.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    if config.tie_word_embeddings:
        assert torch.equal(leaves[_HEAD], leaves[_EMBEDDING])
        del leaves[_HEAD]
    logits_TV = logits(config, leaves, batch)
    if logits_TV.dtype == torch.bfloat16:
        logits_TV = logits_TV.float()
    losses_T = nnf.cross_entropy(logits_TV, batch.targets_T, reduction="none")
    (losses_T.sum() * loss_scale).backward()
    grads: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        grads[name] = leaf.grad
    return float(losses_T.detach().double().sum()), grads


def summed_grads(
    config: LlamaConfig,
    parameters: Mapping[str, Tensor],
    batches: Iterable[MicroBatch],
    loss_scale: float,
) -> dict[str, Tensor]:
    """Gradients added over micro-batches in fp64, the order of which does not matter then."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for batch in batches:
        for name, grad in loss_and_grads(config, parameters, batch, loss_scale)[1].items():
            total[name] += grad
    return total


def logits(config: LlamaConfig, weights: Mapping[str, Tensor], batch: MicroBatch) -> Tensor:
    """Scores of every next token, shape (T, V)."""
    x_TD = nnf.embedding(batch.input_ids_T, weights[_EMBEDDING])
    for layer in range(config.num_hidden_layers):
        mine = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_TD = x_TD + _attention(config, mine, x_TD, batch)
        x_TD = x_TD + _feed_forward(config, mine, x_TD)
    normed_TD = rms_norm(x_TD, weights["model.norm.weight"], config.rms_norm_eps)
    return nnf.linear(normed_TD, weights[_EMBEDDING if config.tie_word_embeddings else _HEAD])


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    # The view makes autograd add the two gradients of x inside the norm before any other.
    x_TD = x_TD.view_as(x_TD)
    return x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps) * w_D


def rotate(x_THE: Tensor, position_ids_T: Tensor, rope: Rope) -> Tensor:
    width = x_THE.shape[-1]
    angles_TE = torch.outer(position_ids_T.float(), rope.frequencies_e).repeat(1, 2)
    first, second = x_THE[..., : width // 2], x_THE[..., width // 2 :]
    turned_THE = torch.cat((-second, first), dim=-1)
    cos_T1E, sin_T1E = angles_TE.cos()[:, None], angles_TE.sin()[:, None]
    if rope.attention_factor != 1.0:
        cos_T1E, sin_T1E = cos_T1E * rope.attention_factor, sin_T1E * rope.attention_factor
    return (x_THE * cos_T1E + turned_THE * sin_T1E).to(x_THE.dtype)


def dense_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Iterable[int]):
    """Softmax over the whole window with everything outside the segment masked out."""
    num_tokens, num_heads, width = q_THE.shape
    segment_T = torch.zeros(num_tokens, dtype=torch.long)
    for number, (start, end) in enumerate(pairwise(cu_seqlens)):
        segment_T[start:end] = number
    seen_TT = (segment_T[:, None] == segment_T[None, :]).tril()
    group = num_heads // k_TKE.shape[1]
    k_THE, v_THE = (x.repeat_interleave(group, dim=1) for x in (k_TKE, v_TKE))
    scores_HTT = torch.einsum("qhe,khe->hqk", q_THE, k_THE) / width**0.5
    weights_HTT = scores_HTT.masked_fill(~seen_TT, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights_HTT, v_THE)


def _attention(
    config: LlamaConfig, weights: Mapping[str, Tensor], x_TD: Tensor, batch: MicroBatch
) -> Tensor:
    normed_TD = rms_norm(x_TD, weights["input_layernorm.weight"], config.rms_norm_eps)
    width = config.hidden_size // config.num_attention_heads
    q, k, v = (
        _affine(weights, f"self_attn.{part}_proj", normed_TD).unflatten(1, (-1, width))
        for part in "qkv"
    )
    rope = rope_of(width, config.rope_theta, config.rope_scaling)
    q = rotate(q, batch.position_ids_T, rope)
    k = rotate(k, batch.position_ids_T, rope)
    documents = [
        nnf.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            k[start:end].transpose(0, 1)[None],
            v[start:end].transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for start, end in pairwise(batch.cu_seqlens)
    ]
    return _affine(weights, "self_attn.o_proj", torch.cat(documents).flatten(1))


def _affine(weights: Mapping[str, Tensor], module: str, x: Tensor) -> Tensor:
    return nnf.linear(x, weights[f"{module}.weight"], weights.get(f"{module}.bias"))


def _feed_forward(config: LlamaConfig, weights: Mapping[str, Tensor], x_TD: Tensor) -> Tensor:
    normed_TD = rms_norm(x_TD, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate_TF = nnf.linear(normed_TD, weights["mlp.gate_proj.weight"])
    up_TF = nnf.linear(normed_TD, weights["mlp.up_proj.weight"])
    return nnf.linear(nnf.silu(gate_TF) * up_TF, weights["mlp.down_proj.weight"])
