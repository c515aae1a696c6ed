"""What a rank holds between iterations: parameters, moments, and the transaction around a step.

`version` counts completed steps. A step completes in two moves: `vote_complete` once every
member's contribution is here, `apply` when the parameters have changed. The reduced gradients
are kept until then, so a rank that saw the vote but did not apply, or did not even see it, can
still roll forward to what the others did (DESIGN §6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from resihp.config import JobConfig
from resihp.executor.adamw import AdamW, learning_rate
from resihp.executor.boundary import Agreement
from resihp.executor.flat import bytes_of
from resihp.executor.init import initial_parameters
from resihp.executor.layouts import slice_of
from resihp.executor.model import Model, tensors_of
from resihp.ir.program import Program
from resihp.ir.reshard import chunks_of_member
from resihp.wire.messages import Commit, StepRecord

__all__ = ["Holding", "TrainState", "clip_scale", "holding_of", "initial_holding", "shard_hashes"]


class Holding(NamedTuple):
    """A rank's shards of all its stages in one layout, with their optimizer."""

    program: Program
    optimizer: AdamW
    working: dict[str, Tensor]
    """What F and B read: the parameters themselves, or bf16 copies of them."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Shards by name, fp32: what the optimizer updates and what moves."""
        return self.optimizer.parameters

    def kinds(self) -> tuple[Mapping[str, Tensor], ...]:
        """Everything that moves with a shard: parameters and both moments."""
        optimizer = self.optimizer
        return optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq

    def refresh(self) -> None:
        """Make the working copies anew after an update; they stay the same tensors."""
        for name, parameter in self.parameters.items():
            if self.working[name] is not parameter:
                self.working[name].copy_(parameter)


def holding_of(program: Program, optimizer: AdamW) -> Holding:
    """`optimizer` holds the shards of `program`'s layers; working copies are of its precision."""
    parameters = optimizer.parameters
    if program.precision == "fp32":
        return Holding(program, optimizer, dict(parameters))
    working = {name: parameter.to(torch.bfloat16) for name, parameter in parameters.items()}
    return Holding(program, optimizer, working)


def initial_holding(
    model: Model, job: JobConfig, program: Program, device: torch.device | str = "cpu"
) -> Holding:
    """The untrained shards of `program`'s layers; the same logical model in every layout."""
    names = tensors_of(model, program.layers)
    parameters = initial_parameters(
        model, names, job.job.seed, degree=program.tp, index=program.tp_index, device=device
    )
    return holding_of(program, AdamW(job.optimizer, parameters))


def clip_scale(grad_norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`."""
    return min(1.0, max_norm / (grad_norm + 1e-6))


class TrainState:
    """The state of one rank over all generations.

    `current` is the holding of generation `layout`; `pending` one that is complete but not yet
    in use, because its generation has not been told to go.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self.agreement = Agreement()
        self.layout = 0
        self.current: Holding | None = None
        self.pending: tuple[int, Holding | None] | None = None
        self.version = 0
        self.updates = 0
        self.voted = 0
        self.record: StepRecord | None = None
        self.reduced: dict[str, Tensor] | None = None

    @property
    def layouts(self) -> tuple[int, ...]:
        """Generations whose layout this rank can continue from."""
        return (self.layout, self.pending[0]) if self.pending is not None else (self.layout,)

    # --- a step

    def reduce_complete(self, reduced: dict[str, Tensor]) -> None:
        """The gradients of step `version` are complete on this rank."""
        assert self.version == self.voted, "a new step before the last one was applied"
        self.reduced = reduced

    def vote_complete(self, record: StepRecord) -> None:
        """All members contributed to the vote of `record.step`."""
        assert record.step == self.version
        self.voted = record.step + 1
        self.record = record

    def apply(self) -> None:
        """Complete the voted step: update the parameters, or skip as all others do."""
        record = self.record
        assert record is not None
        assert record.step == self.version
        assert self.voted == self.version + 1
        if not record.skipped:
            assert self.current is not None
            assert self.reduced is not None
            scale = clip_scale(record.grad_norm, self._job.optimizer.grad_clip)
            self.current.optimizer.step(self.reduced, record.learning_rate, scale)
            self.current.refresh()
            self.updates += 1
        self.reduced = None
        self.version += 1

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from the job file."""
        optimizer = self._job.optimizer
        return learning_rate(
            step,
            peak=optimizer.lr,
            floor=optimizer.lr * optimizer.min_lr_ratio,
            num_warmup_steps=optimizer.warmup_steps,
            num_steps=self._job.job.steps,
        )

    # --- between generations

    def forget(self) -> None:
        """Hold nothing: this rank was lost to the others, who went on without it."""
        self.layout, self.current, self.pending, self.reduced = 0, None, None, None

    def adopt(self, base: int, commit: Commit) -> None:
        """Continue from the layout of generation `base`, at `commit.version`.

        A rank that is one step behind rolls forward with the gradients that it kept; one that
        holds nothing (standby) only takes over the numbers.
        """
        if self.pending is not None and self.pending[0] == base:
            self.layout, self.current = self.pending
        self.pending = None
        assert self.layout == base or self.current is None, f"no layout of generation {base} here"
        if self.current is None:
            self.version = self.voted = commit.version
            self.updates, self.record = commit.updates, commit.record
        elif self.version < commit.version:
            assert self.version + 1 == commit.version
            assert commit.record is not None
            assert self.reduced is not None, "asked to roll forward without gradients"
            if self.voted == self.version:
                self.vote_complete(commit.record)
            self.apply()
        settled = (commit.version, commit.version, commit.updates)
        assert (self.version, self.voted, self.updates) == settled

    def prepare(self, generation: int, holding: Holding | None) -> None:
        """`holding` is complete; it replaces the current one at `go`.

        Its optimizer gets our number of updates: a rank that was standby received moments, but
        knows the number, on which their bias correction depends, from the commit only.
        """
        if holding is not None:
            holding.optimizer.num_steps = self.updates
        self.pending = (generation, holding)

    def go(self) -> None:
        """Use the prepared holding and let the old layout go."""
        assert self.pending is not None
        self.layout, self.current = self.pending
        self.pending = None
        self.reduced = None


def shard_hashes(model: Model, holding: Holding, num_chunks: int) -> dict[str, str]:
    """SHA-256 of parameters and moments, per layer and chunk, comparable between TP layouts."""
    program = holding.program
    chunks = chunks_of_member(program.tp_index, program.tp, num_chunks)
    hashes: dict[str, str] = {}
    for layer in (layer for first, last in program.layers for layer in range(first, last + 1)):
        names = sorted(model.tensors(layer, layer))
        whole = [name for name in names if model.layout(name).dim is None]
        cut = [name for name in names if model.layout(name).dim is not None]
        hashes[f"layer {layer} replicated"] = _digest(
            kind[name] for name in whole for kind in holding.kinds()
        )
        for chunk in chunks:
            hashes[f"layer {layer} shard {chunk}/{num_chunks}"] = _digest(
                slice_of(
                    model.layout(name),
                    kind[name],
                    chunk,
                    num_chunks,
                    program.tp,
                    program.tp_index,
                )
                for name in cut
                for kind in holding.kinds()
            )
    return hashes


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()
