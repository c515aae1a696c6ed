"""The work of training: stages, gradient sums, reductions, the vote and the update of one rank.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.device.interface import Communicator
from resihp.executor.gradients import GradientTree
from resihp.executor.model import Key, Model, Stage
from resihp.executor.reduce import Reducer
from resihp.executor.sampler import GlobalBatches
from resihp.executor.state import TrainState
from resihp.executor.vote import Contribution, Voter, squared_norms
from resihp.ir.program import Program, TensorType
from resihp.wire.messages import StepRecord

__all__ = ["TrainingWork"]


class TrainingWork:
    """What the interpreter asks of one rank in one generation (see `resihp.executor.work.Work`)."""

    def __init__(
        self,
        program: Program,
        model: Model,
        stages: Mapping[int, Stage],
        reducers: Mapping[int, Reducer],
        state: TrainState,
        batches: GlobalBatches,
        *,
        gather_group: Communicator,
        world: Communicator,
        voter: Voter,
        counts_norms: bool,
    ) -> None:
        self._program = program
        self._model = model
        self._stages = stages
        self._reducers = reducers
        self._state = state
        self._batches = batches
        self._gather_group = gather_group
        self._world = world
        self._voter = voter
        self._counts_norms = counts_norms
        self._hidden_size = model.hidden_size
        self._trees = {
            stage: GradientTree(batches.num_replicas, batches.num_microbatches) for stage in stages
        }
        self._samples: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """See `Work`."""
        self.discard()
        self._step = step
        self._start_s = time.monotonic()
        self._loss_scale = 1.0 / self._batches.num_targets(step)

    def forward(self, stage: int, key: Key, x: Tensor | None) -> Tensor | None:
        """See `Work`."""
        batch = self._batches.micro_batch(self._step, *key)
        held = self._stages[stage]
        if held.has_head and self._program.tp_index == 0:
            self._samples[self._number(key)] = batch.sample_id
        return held.forward(key, batch, x, loss_scale=self._loss_scale)

    def backward_input(self, stage: int, key: Key, dy: Tensor | None) -> Tensor | None:
        """See `Work`."""
        return self._stages[stage].backward_input(key, dy)

    def backward_weight(self, stage: int, key: Key) -> None:
        """See `Work`."""
        self._trees[stage].add(*key, self._stages[stage].backward_weight(key))

    def num_bytes(self, tensor: TensorType) -> int:
        """See `Work`."""
        return tensor.num_bytes

    def chunk(self, payload: Tensor, chunk: int, num_chunks: int) -> Tensor:
        """See `Work`: rows of the activation or gradient."""
        return payload.chunk(num_chunks)[chunk]

    def arrived(self, raw: Any, num_chunks: int) -> Tensor:
        """See `Work`."""
        num_rows = self._program.batch.tokens // num_chunks
        if len(raw) != 4 * num_rows * self._hidden_size:
            raise CommError(f"{len(raw)} bytes do not make {num_rows} tokens")
        return torch.frombuffer(raw, dtype=torch.float32).view(num_rows, self._hidden_size)

    def gather(self, stage: int, chunks: Sequence[Tensor]) -> Tensor:
        """See `Work`."""
        return self._gather_group.all_gather(torch.cat(list(chunks))).flatten(0, 1)

    def reduce(self, stage: int) -> None:
        """See `Work`."""
        parameters = self._stages[stage].parameters
        self._state.reduce_complete(self._reducers[stage].reduce(self._trees[stage], parameters))

    def vote(self) -> None:
        """See `Work`."""
        reduced = self._state.reduced
        assert reduced is not None
        program = self._program
        contribution = Contribution(
            finite=all(bool(tensor.isfinite().all()) for tensor in reduced.values()),
            losses={n: self._loss_of(n) for n in self._samples},
            samples=self._samples,
            squared_norms=squared_norms(
                self._model, reduced, program.tp_index, counts=self._counts_norms
            ),
        )
        outcome = self._voter.count(self._world.all_gather(self._voter.pack(contribution)))
        self._state.vote_complete(
            StepRecord(
                step=self._step,
                loss=outcome.loss_sum * self._loss_scale,
                grad_norm=outcome.grad_norm,
                learning_rate=self._state.learning_rate(self._step),
                skipped=not outcome.finite,
                num_tokens=len(outcome.samples) * program.batch.tokens,
                samples=outcome.samples,
                duration_s=time.monotonic() - self._start_s,
            )
        )

    def apply(self) -> None:
        """See `Work`."""
        self._state.apply()

    def record(self) -> StepRecord:
        """See `Work`."""
        assert self._state.record is not None
        return self._state.record

    def discard(self) -> None:
        """See `Work`."""
        self._samples = {}
        for stage, tree in self._trees.items():
            tree.discard_all()
            self._stages[stage].discard_all()

    def _number(self, key: Key) -> int:
        """Global number of a micro-batch."""
        return key[0] * self._batches.num_microbatches + key[1]

    def _loss_of(self, number: int) -> float:
        last = self._stages[self._program.num_stages - 1]
        home, microbatch = divmod(number, self._batches.num_microbatches)
        return last.loss_of((home, microbatch))
