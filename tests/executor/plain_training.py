"""Training in one process, with plain autograd over the whole model: the reference for plans.

Nothing of the executor is here but its data: weights are leaves, backward is one call, a step is
a loop over the micro-batches of the global batch. Two ways to run it:

- in fp64, where rounding is nothing beside that of fp32: what every plan should come to;
- in fp32, in the order of additions that the executor promises: what plans have bit by bit where
  no sum is split over a TP group. With `parts` the contractions that a TP group of that degree
  splits are split likewise: another rounding of the same thing, which says how far two of them
  may be apart.

Shapes: T tokens, D hidden size, H query and K key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from reference import dense_attention, rms_norm
from torch import Tensor

from resihp.config import JobConfig, ModelConfig
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.sampler import GlobalBatches

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Tensor]


class Trained(NamedTuple):
    """What training came to."""

    losses: list[float]
    """Of each step, in nats per target."""
    grad_norms: list[float]
    """Before clipping."""
    parameters: Tensors


class Arithmetic(NamedTuple):
    """How numbers are kept and added."""

    dtype: torch.dtype
    """Of F and B; everything else is not less than fp32."""
    parts: int = 1
    """Into how many near-equal runs TP cuts: inputs of o and down, outputs of all the others."""

    @property
    def sums(self) -> torch.dtype:
        """Of parameters, moments and sums of gradients."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


EXACT = Arithmetic(torch.float64)
SINGLE = Arithmetic(torch.float32)


def train(
    job: JobConfig,
    batches: GlobalBatches,
    initial: Mapping[str, Tensor],
    arithmetic: Arithmetic,
    num_steps: int,
    spoil: Callable[[tuple[int, int], Tensors], None] | None = None,
) -> Trained:
    """`num_steps` steps from the whole tensors `initial`, which stay as they are.

    `spoil` may change the gradients of a micro-batch, to see that it is noticed.
    """
    parameters = {name: value.to(arithmetic.sums, copy=True) for name, value in initial.items()}
    tied = job.model.tie_word_embeddings
    mean = {name: torch.zeros_like(value) for name, value in parameters.items()}
    mean_sq = {name: torch.zeros_like(value) for name, value in parameters.items()}
    losses, norms = list[float](), list[float]()
    for step in range(num_steps):
        loss, grads = _global_gradients(job.model, parameters, batches, step, arithmetic, spoil)
        if tied:
            grads[EMBEDDING] = grads[HEAD] = grads[EMBEDDING] + grads[HEAD]
        squares = [
            float(grads[name].double().square().sum())
            for name in sorted(grads)
            if not (tied and name == HEAD)
        ]
        norm = math.sqrt(sum(squares))
        scale = min(1.0, job.optimizer.grad_clip / (norm + 1e-6))
        for name, grad in grads.items():
            _adamw(job, step, parameters[name], mean[name], mean_sq[name], grad * scale)
        losses.append(loss)
        norms.append(norm)
    return Trained(losses, norms, parameters)


def learning_rate(job: JobConfig, step: int) -> float:
    """Linear warm-up, then a cosine to its floor at the last step."""
    optimizer, num_steps = job.optimizer, job.job.steps
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    num_cosine = num_steps - optimizer.warmup_steps
    progress = 1.0
    if num_cosine > 0:
        progress = min(1.0, (step - optimizer.warmup_steps + 1) / num_cosine)
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _adamw(
    job: JobConfig, step: int, parameter: Tensor, mean: Tensor, mean_sq: Tensor, grad: Tensor
) -> None:
    """Loshchilov and Hutter 2019, algorithm 2; matrices alone decay."""
    config, lr = job.optimizer, learning_rate(job, step)
    mean.copy_(mean * config.beta1 + grad * (1.0 - config.beta1))
    mean_sq.copy_(mean_sq * config.beta2 + grad * grad * (1.0 - config.beta2))
    root = mean_sq.sqrt() / math.sqrt(1.0 - config.beta2 ** (step + 1)) + config.eps
    if parameter.dim() == 2:
        parameter *= 1.0 - lr * config.weight_decay
    parameter -= mean / root * (lr / (1.0 - config.beta1 ** (step + 1)))


def _global_gradients(
    model: ModelConfig,
    parameters: Tensors,
    batches: GlobalBatches,
    step: int,
    arithmetic: Arithmetic,
    spoil: Callable[[tuple[int, int], Tensors], None] | None,
) -> tuple[float, Tensors]:
    """Mean loss of the targets of a global batch and its gradients.

    Of tied tensors each side has its own gradient.
    """
    of_replicas: list[list[Tensors]] = []
    loss_sum, scale = 0.0, 1.0 / _num_targets(batches, step)
    for home in range(batches.num_replicas):
        grads: list[Tensors] = []
        for number in range(batches.num_microbatches):
            batch = batches.micro_batch(step, home, number)
            loss, found = loss_and_gradients(model, parameters, batch, scale, arithmetic)
            if spoil is not None:
                spoil((home, number), found)
            loss_sum += loss
            grads.append(found)
        of_replicas.append(grads)
    names = sorted(parameters)
    summed = {
        name: _tree_sum([_tree_sum([grads[name] for grads in replica]) for replica in of_replicas])
        for name in names
    }
    return loss_sum * scale, summed


def _num_targets(batches: GlobalBatches, step: int) -> int:
    return sum(
        int((batches.micro_batch(step, home, number).targets_T != IGNORED_TARGET).sum())
        for home in range(batches.num_replicas)
        for number in range(batches.num_microbatches)
    )


def _tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The largest power of two that leaves something on the right, then the rest."""
    if len(parts) == 1:
        return parts[0]
    split = 1
    while 2 * split < len(parts):
        split *= 2
    return _tree_sum(parts[:split]) + _tree_sum(parts[split:])


def loss_and_gradients(
    model: ModelConfig,
    parameters: Tensors,
    batch: MicroBatch,
    scale: float,
    arithmetic: Arithmetic = SINGLE,
) -> tuple[float, Tensors]:
    """Summed cross-entropy of a micro-batch in fp64, and the gradients of it times `scale`."""
    dtype = arithmetic.dtype
    leaves = {name: p.detach().to(dtype).requires_grad_() for name, p in parameters.items()}
    logits_TV = _Plain(model, leaves, arithmetic).logits(batch).to(arithmetic.sums)
    losses_T = nnf.cross_entropy(
        logits_TV, batch.targets_T, ignore_index=IGNORED_TARGET, reduction="none"
    )
    names = sorted(leaves)
    grads = torch.autograd.grad(losses_T.sum() * scale, [leaves[name] for name in names])
    summable = (grad.to(arithmetic.sums) for grad in grads)
    return float(losses_T.detach().double().sum()), dict(zip(names, summable, strict=True))


class _Plain:
    """The forward of a LLaMA or Qwen2 over whole tensors."""

    def __init__(self, model: ModelConfig, weights: Tensors, arithmetic: Arithmetic) -> None:
        self.model, self.weights, self.arithmetic = model, weights, arithmetic

    def logits(self, batch: MicroBatch) -> Tensor:
        x_TD = self.weights[EMBEDDING][batch.input_ids_T]
        for layer in range(self.model.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            x_TD = x_TD + self._attention(prefix, x_TD, batch)
            x_TD = x_TD + self._feed_forward(prefix, x_TD)
        return self._linear("lm_head", self._norm("model.norm", x_TD))

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weights[name + ".weight"], self.model.rms_norm_eps)

    def _linear(self, name: str, x_TI: Tensor) -> Tensor:
        """As its parts, side by side: they add up in the gradient of the input."""
        w_OI, bias_O = self.weights[name + ".weight"], self.weights.get(name + ".bias")
        outputs = [
            nnf.linear(x_TI, w_OI[a:b], None if bias_O is None else bias_O[a:b])
            for a, b in self._runs(w_OI.shape[0])
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _row_linear(self, name: str, x_TI: Tensor) -> Tensor:
        """As its parts, added."""
        w_OI = self.weights[name + ".weight"]
        sums = [nnf.linear(x_TI[:, a:b], w_OI[:, a:b]) for a, b in self._runs(w_OI.shape[1])]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def _runs(self, size: int) -> list[tuple[int, int]]:
        parts = self.arithmetic.parts
        return list(pairwise(part * size // parts for part in range(parts + 1)))

    def _attention(self, prefix: str, x_TD: Tensor, batch: MicroBatch) -> Tensor:
        normed_TD = self._norm(prefix + "input_layernorm", x_TD)
        width = self.model.head_dim
        q, k, v = (
            self._linear(f"{prefix}self_attn.{part}_proj", normed_TD).unflatten(1, (-1, width))
            for part in "qkv"
        )
        q, k = self._rotate(q, batch.position_ids_T), self._rotate(k, batch.position_ids_T)
        if self.arithmetic.dtype is torch.float64:
            mixed_THE = dense_attention(q, k, v, batch.cu_seqlens)
        else:
            mixed_THE = _attention_by_document(q, k, v, batch.cu_seqlens)
        return self._row_linear(prefix + "self_attn.o_proj", mixed_THE.flatten(1))

    def _rotate(self, x_THE: Tensor, position_ids_T: Tensor) -> Tensor:
        """Pairs (x[i], x[i + E/2]) turned; the angles are single precision by definition."""
        width = x_THE.shape[-1]
        exponents = torch.arange(0, width, 2).float() / width
        angles_T1e = position_ids_T.float()[:, None, None] * (
            1.0 / self.model.rope_theta**exponents
        )
        cos_T1e, sin_T1e = angles_T1e.cos().to(x_THE.dtype), angles_T1e.sin().to(x_THE.dtype)
        a_THe, b_THe = x_THE[..., : width // 2], x_THE[..., width // 2 :]
        return torch.cat(
            (a_THe * cos_T1e - b_THe * sin_T1e, b_THe * cos_T1e + a_THe * sin_T1e), dim=-1
        )

    def _feed_forward(self, prefix: str, x_TD: Tensor) -> Tensor:
        normed_TD = self._norm(prefix + "post_attention_layernorm", x_TD)
        gate_TF = self._linear(prefix + "mlp.gate_proj", normed_TD)
        up_TF = self._linear(prefix + "mlp.up_proj", normed_TD)
        return self._row_linear(prefix + "mlp.down_proj", nnf.silu(gate_TF) * up_TF)


def _attention_by_document(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_seqlens: Sequence[int]
) -> Tensor:
    documents = [
        nnf.scaled_dot_product_attention(
            q_THE[start:end].transpose(0, 1)[None],
            k_TKE[start:end].transpose(0, 1)[None],
            v_TKE[start:end].transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=q_THE.shape[1] != k_TKE.shape[1],
        )[0].transpose(0, 1)
        for start, end in pairwise(cu_seqlens)
    ]
    return torch.cat(documents)
