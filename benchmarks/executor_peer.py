"""The peer of `executor_speed.py`: torch.distributed.pipelining on the same model and data.

As shipped, a stage is a plain module and torch splits its backward by walking the autograd graph.
With a `dw_builder` it is built from our layers, which leave the weight gradients for later: what
remains of the difference is the runtime itself.

Shapes: T tokens of a micro-batch, D hidden size, H heads, E head width, e half of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from executor_cases import MODEL, NUM_MICROBATCHES, SEED, Case, loss_scale, micro_batches
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from resihp.executor.attention import document_attention
from resihp.executor.decoder import Decoder
from resihp.executor.llama import EMBEDDING, FINAL_NORM, HEAD, head_dim, layer_prefix
from resihp.executor.models.llama import Llama
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.rope import rope_of, rope_table
from resihp.executor.tp import SingleMember
from resihp.executor.weight_grads import WeightGradStore

CPU = torch.device("cpu")
_ROPE = rope_of(head_dim(MODEL), MODEL.rope_theta, MODEL.rope_scaling)


class _Part(nn.Module):
    """Layers `first .. last`, with parameters under the names of ours."""

    def __init__(self, first: int, last: int, batches: list[MicroBatch]) -> None:
        super().__init__()
        model = Llama(MODEL)
        self.layers = range(first, last + 1)
        self.batches = batches
        self.names = model.tensors(first, last)
        self.weights = nn.ParameterList(model.initial(name, SEED) for name in self.names)
        self.by_name: dict[str, nn.Parameter] = dict(zip(self.names, self.weights, strict=True))

    @property
    def has_embedding(self) -> bool:
        return EMBEDDING in self.by_name

    @property
    def has_head(self) -> bool:
        return HEAD in self.by_name

    def gradients(self) -> dict[str, Tensor]:
        return {name: cast("Tensor", weight.grad) for name, weight in self.by_name.items()}


class PlainPart(_Part):
    """Written as one writes a model in PyTorch."""

    def forward(self, x: Tensor, mb: Tensor) -> Tensor:
        batch = self.batches[int(mb)]
        x_TD = nnf.embedding(x[0], self.by_name[EMBEDDING]) if self.has_embedding else x
        cos_T1e, sin_T1e = rope_table(batch.position_ids_T, _ROPE)
        for layer in self.layers:
            prefix = layer_prefix(layer)
            x_TD = x_TD + self._attention(prefix, x_TD, cos_T1e, sin_T1e, batch)
            x_TD = x_TD + self._feed_forward(prefix, x_TD)
        if not self.has_head:
            return x_TD
        return nnf.linear(self._norm(FINAL_NORM, x_TD), self.by_name[HEAD])

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        return nnf.rms_norm(x_TD, x_TD.shape[-1:], self.by_name[name], MODEL.rms_norm_eps)

    def _attention(
        self, prefix: str, x_TD: Tensor, cos_T1e: Tensor, sin_T1e: Tensor, batch: MicroBatch
    ) -> Tensor:
        normed_TD = self._norm(prefix + "input_layernorm.weight", x_TD)
        q_THE, k_THE, v_THE = (
            nnf.linear(normed_TD, self.by_name[f"{prefix}self_attn.{part}_proj.weight"]).view(
                len(x_TD), -1, head_dim(MODEL)
            )
            for part in "qkv"
        )
        mixed_THE = document_attention(
            _rotated(q_THE, cos_T1e, sin_T1e),
            _rotated(k_THE, cos_T1e, sin_T1e),
            v_THE,
            batch.cu_seqlens,
        )
        return nnf.linear(mixed_THE.flatten(1), self.by_name[prefix + "self_attn.o_proj.weight"])

    def _feed_forward(self, prefix: str, x_TD: Tensor) -> Tensor:
        normed_TD = self._norm(prefix + "post_attention_layernorm.weight", x_TD)
        gate_TF = nnf.linear(normed_TD, self.by_name[prefix + "mlp.gate_proj.weight"])
        up_TF = nnf.linear(normed_TD, self.by_name[prefix + "mlp.up_proj.weight"])
        return nnf.linear(nnf.silu(gate_TF) * up_TF, self.by_name[prefix + "mlp.down_proj.weight"])


def _rotated(x_THE: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_T1e - second * sin_T1e, second * cos_T1e + first * sin_T1e), dim=-1
    )


class DeferredPart(_Part):
    """Built from our layers; `dw_builder` hands out the weight gradients of the last backward."""

    def __init__(self, first: int, last: int, batches: list[MicroBatch]) -> None:
        super().__init__(first, last, batches)
        weights = {name: weight.detach() for name, weight in self.by_name.items()}
        self._decoder = Decoder(MODEL, first, last, SingleMember(), weights)
        self._forwarded: deque[tuple[WeightGradStore, MicroBatch, Tensor | None]] = deque()

    def forward(self, x: Tensor, mb: Tensor) -> Tensor:
        batch, store = self.batches[int(mb)], WeightGradStore()
        x_TD = x
        if self.has_embedding:
            x_TD = self._decoder.embed(batch).requires_grad_()
        y_TD = self._decoder.hidden(x_TD, batch, store)
        self._forwarded.append((store, batch, x_TD if self.has_embedding else None))
        return self._decoder.logits(y_TD, store) if self.has_head else y_TD

    def dw_builder(self) -> Callable[..., None]:
        """Micro-batches run backward in the order in which they ran forward."""
        store, batch, embedded_TD = self._forwarded.popleft()
        if embedded_TD is not None:
            assert embedded_TD.grad is not None
            store.push(self._decoder.embedding_entry(batch, embedded_TD.grad))

        def run() -> None:
            for name, grad in store.compute().items():
                weight = self.by_name[name]
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)

        return run


class Peer:
    """torch's runtime on one rank; the default process group is gloo over all ranks."""

    def __init__(self, case: Case, rank: int, *, deferred: bool) -> None:
        batches = micro_batches(case.num_tokens)
        self._parts: dict[int, _Part] = {}
        stages: list[PipelineStage] = []
        for number in case.stages[rank]:
            kind = DeferredPart if deferred else PlainPart
            part = self._parts[number] = kind(*case.layers_of(number), batches)
            builder = part.dw_builder if isinstance(part, DeferredPart) else None
            stages.append(_stage(part, number, case, builder))
        schedule: Any = case.schedule.torch_class
        scale = loss_scale(batches)
        self._is_single = case.schedule_name == "1F1B"
        self._schedule = schedule(
            stages[0] if self._is_single else stages,
            NUM_MICROBATCHES,
            loss_fn=lambda logits_TV, target: scale * _loss(logits_TV, target[0]),
            scale_grads=False,
        )
        self._ids = torch.stack([batch.input_ids_T for batch in batches])
        self._targets = torch.stack([batch.targets_T for batch in batches])
        self._numbers = torch.arange(NUM_MICROBATCHES)
        self._is_first = any(part.has_embedding for part in self._parts.values())
        self._is_last = any(part.has_head for part in self._parts.values())

    @property
    def order(self) -> dict[int, list[Any]] | None:
        """What each rank runs, as torch says it; None for 1F1B, of which it says it wrongly."""
        return None if self._is_single else self._schedule.pipeline_order

    def run(self) -> None:
        """Gradients of one iteration, in place of those of the one before."""
        for part in self._parts.values():
            for weight in part.by_name.values():
                weight.grad = None
        self._schedule.step(
            *([self._ids] if self._is_first else []),
            mb=self._numbers,
            target=self._targets if self._is_last else None,
            losses=[] if self._is_last else None,
            return_outputs=False,
        )

    def gradients(self) -> dict[str, Tensor]:
        """Of the last iteration, by name."""
        found: dict[str, Tensor] = {}
        for part in self._parts.values():
            found |= part.gradients()
        return found


def _stage(
    part: _Part, number: int, case: Case, builder: Callable[[], Callable[..., None]] | None
) -> PipelineStage:
    shape_TD = (case.num_tokens, MODEL.hidden_size)
    ids = torch.zeros(1, case.num_tokens, dtype=torch.long)
    given = ids if part.has_embedding else torch.zeros(shape_TD, requires_grad=True)
    width = MODEL.vocab_size if part.has_head else MODEL.hidden_size
    return PipelineStage(
        part,
        number,
        case.num_stages,
        CPU,
        input_args=given,
        output_args=torch.zeros(case.num_tokens, width, requires_grad=True),
        dw_builder=builder,
    )


def _loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return nnf.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")
