"""Training as the interpreter's `Work`: real stages, gradient sums, the vote and the update.

Payloads are tensors of shape (T, D): T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.flat import tensor_of, upload, used_here
from resihp.executor.held import Held, Loss
from resihp.executor.memberships import num_chunks_at
from resihp.executor.model import Key, Stage, StageOptions
from resihp.executor.reduce import (
    FastReducer,
    OrderedReducer,
    Reducer,
    hosted_nodes,
    weights_run_by,
)
from resihp.executor.shards import StageShards
from resihp.executor.snapshots.cadence import Cost
from resihp.executor.tied import TiedSums
from resihp.executor.vote import (
    Contribution,
    Voter,
    counted_here,
    read_together,
    squared_norms,
)
from resihp.wire.messages import StepRecord

if TYPE_CHECKING:
    from resihp.config import Numerics
    from resihp.executor.device.interface import Communicator
    from resihp.executor.held import Keep
    from resihp.executor.model import Model
    from resihp.executor.packing import MicroBatch
    from resihp.executor.sampler import GlobalBatches
    from resihp.executor.state import Holding, TrainState
    from resihp.ir.model import Plan
    from resihp.ir.program import Program, TensorType

__all__ = ["TrainingWork"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TrainingWork:
    """One rank's part in the iterations of one generation (see `work.Work`)."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        holding: Holding,
        state: TrainState,
        batches: GlobalBatches,
        groups: Mapping[str, Communicator],
        *,
        numerics: Numerics = "bitwise",
        device: torch.device | str = "cpu",
        keep: Keep | None = None,
    ) -> None:
        """`groups` by role: those of `memberships(model, plan, rank)`.

        `holding` is what this rank holds in `plan`; its tensors are read, and changed by `apply`.
        `keep` is what the iteration that `plan` redoes begins with.
        """
        program = holding.program
        self._program = program
        self._state = state
        self._batches = batches
        self._device = device
        self._dtype = _DTYPES[program.precision]
        self._shape_TD = program.batch.tokens, model.hidden_size
        self._world = groups["world"]
        self._gather = groups["gather"]
        self._keep = keep
        self._stages = _stages(model, holding, groups["tp"])
        self._reducers = {
            stage: _reducer(model, plan, program, stage, groups, numerics, device, keep)
            for stage in program.stages
        }
        self._tied = TiedSums(model, plan, program, groups)
        first = min(g.replica for g in plan.groups if g.pp == program.group.pp)
        self._counted = (
            counted_here(model, holding.parameters, program.tp, program.tp_index)
            if program.group.replica == first
            else frozenset[str]()
        )
        num = program.mesh.dp * program.batch.microbatches
        self._voter = Voter(model.tensors(0, model.num_layers - 1), num)
        self._reduced: dict[str, Tensor] = {}
        self._loaded: dict[Key, MicroBatch] = {}
        self._ended: list[tuple[Stage, Key]] = []
        """Last stage and micro-batch of every loss that this rank brings to the vote."""
        self._step = -1
        if keep is not None:
            self._put(keep)

    def _put(self, keep: Keep) -> None:
        """Compute stream: the iteration that is redone begins with these sums."""
        for stage, sets in keep.held.sums.items():
            self._reducers[stage].put(sets)
        if torch.device(self._device).type == "cuda":
            # Where nothing is left to compute, the first to read them is another stream.
            torch.cuda.current_stream(self._device).synchronize()

    def begin(self, step: int) -> None:
        """See `Work`."""
        if self._keep is None or self._keep.step != step:
            self.discard()
        self._step = step
        self._start_s, self._start_busy_s = time.monotonic(), time.process_time()
        self._loss_scale = 1.0 / self._batches.num_targets(step)

    def discard(self) -> None:
        """See `Work`."""
        for stage in self._stages.values():
            stage.discard_all()
        for reducer in self._reducers.values():
            reducer.discard()
        self._reduced = {}
        self._loaded.clear()
        self._ended.clear()
        self._step = -1

    def held(self) -> Held | None:
        """Streams idle: what is complete of the iteration that was begun; None: none was."""
        if self._step < 0:
            return None
        sums = {stage: reducer.held() for stage, reducer in self._reducers.items()}
        last = self._program.num_stages - 1
        done = frozenset[Key]().union(*(each.keys for each in sums.get(last, ())))
        losses = dict(self._kept_losses())
        ended = [(stage, key) for stage, key in self._ended if key in done]
        values = read_together([stage.loss_of(key) for stage, key in ended])
        for (_, key), value in zip(ended, values, strict=True):
            losses[key] = Loss(value, self._batch(key).sample_id)
        return Held(self._step, sums, losses)

    def _kept_losses(self) -> Mapping[Key, Loss]:
        if self._keep is None or self._keep.step != self._step:
            return {}
        return self._keep.held.losses

    # --- compute

    def forward(self, stage: int, key: Key, x: Tensor | None) -> Tensor | None:
        """See `Work`."""
        runs = self._stages[stage]
        if runs.has_head and self._program.tp_index == 0:
            self._ended.append((runs, key))
        return runs.forward(key, self._batch(key), x, loss_scale=self._loss_scale)

    def backward_input(self, stage: int, key: Key, dy: Tensor | None) -> Tensor | None:
        """See `Work`."""
        return self._stages[stage].backward_input(key, dy)

    def backward_weight(self, stage: int, key: Key) -> None:
        """See `Work`."""
        reducer, runs = self._reducers[stage], self._stages[stage]
        sums = reducer.sums()
        if sums is None:
            reducer.add(key, runs.backward_weight(key))
        else:
            runs.add_weight_gradients(key, sums)
            reducer.added(key)

    def apply(self) -> None:
        """See `Work`."""
        if self._state.reduced is not None:
            used_here(self._state.reduced.values())  # made on the communication stream
        self._state.apply()

    def _batch(self, key: Key) -> MicroBatch:
        """The same one for all stages of this rank."""
        if key not in self._loaded:
            self._loaded[key] = self._batches.micro_batch(self._step, *key, self._device)
        return self._loaded[key]

    # --- messages

    def num_bytes(self, tensor: TensorType) -> int:
        """See `Work`."""
        return tensor.num_bytes

    def chunk(self, payload: Tensor, chunk: int, num_chunks: int) -> Tensor:
        """See `Work`."""
        if num_chunks == 1:
            return payload
        length = payload.shape[0] // num_chunks
        return payload.narrow(0, chunk * length, length)

    def arrived(self, raw: Any, num_chunks: int) -> Tensor:
        """See `Work`."""
        num_tokens, hidden = self._shape_TD
        shape = num_tokens // num_chunks, hidden
        if len(raw) != shape[0] * shape[1] * self._dtype.itemsize:
            raise CommError(f"{len(raw)} bytes do not make {shape} of {self._dtype}")
        return tensor_of(raw, self._dtype).view(shape)

    def gather(self, stage: int, chunks: Sequence[Tensor]) -> Tensor:
        """See `Work`."""
        mine = chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))
        return self._gather.all_gather(mine).view(-1, self._shape_TD[1])

    # --- the end of the iteration

    def reduce(self, stage: int) -> None:
        """See `Work`."""
        self._reduced |= self._reducers[stage].reduce()

    def vote(self) -> None:
        """See `Work`."""
        reduced, self._reduced = self._reduced, {}
        self._tied.add(reduced)
        self._state.reduce_complete(reduced)
        self._state.seal()
        contribution = self._contribution(reduced)
        outcome = self._voter.count(
            self._world.all_gather(upload(self._voter.pack(contribution), self._device))
        )
        self._state.agreement.agree(outcome.asked)
        self._state.vote_complete(
            StepRecord(
                step=self._step,
                loss=outcome.loss_sum * self._loss_scale,
                grad_norm=outcome.grad_norm,
                learning_rate=self._state.learning_rate(self._step),
                skipped=not outcome.finite,
                num_tokens=len(outcome.samples) * self._shape_TD[0],
                samples=outcome.samples,
                duration_s=time.monotonic() - self._start_s,
                snapshot=self._state.is_snapshot_due(outcome.gap),
            )
        )

    def _contribution(self, reduced: Mapping[str, Tensor]) -> Contribution:
        numbers = [self._number(key) for _, key in self._ended]
        losses = [stage.loss_of(key) for stage, key in self._ended]
        seen = read_together([*squared_norms(reduced).values(), *losses])
        squares = dict(zip(reduced, seen, strict=False))
        kept = {self._number(key): loss for key, loss in self._kept_losses().items()}
        return Contribution(
            finite=all(map(math.isfinite, squares.values())),
            losses={number: loss.value for number, loss in kept.items()}
            | dict(zip(numbers, seen[len(squares) :], strict=True)),
            samples={number: loss.sample for number, loss in kept.items()}
            | {
                number: self._batch(key).sample_id
                for number, (_, key) in zip(numbers, self._ended, strict=True)
            },
            squared_norms={name: squares[name] for name in self._counted},
            asked=self._state.agreement.brought(),
            gap=self._state.snapshot_gap(self._cost()),
        )

    def _cost(self) -> Cost:
        """Of this iteration so far."""
        busy_s = time.process_time() - self._start_busy_s
        return Cost(busy_s, time.monotonic() - self._start_s)

    def _number(self, key: Key) -> int:
        """Number of a micro-batch in the global batch."""
        return key[0] * self._program.batch.microbatches + key[1]

    def record(self) -> StepRecord:
        """See `Work`."""
        record = self._state.record
        assert record is not None
        return record


def _stages(model: Model, holding: Holding, tp: Communicator) -> dict[int, Stage]:
    program = holding.program
    return {
        stage: model.stage(
            first,
            last,
            tp,
            {name: holding.working[name] for name in model.tensors(first, last)},
            StageOptions(recompute=stage in program.recompute),
        )
        for stage, (first, last) in zip(program.stages, program.layers, strict=True)
    }


def _reducer(
    model: Model,
    plan: Plan,
    program: Program,
    stage: int,
    groups: Mapping[str, Communicator],
    numerics: Numerics,
    device: torch.device | str,
    keep: Keep | None,
) -> Reducer:
    layers = program.layers[program.stages.index(stage)]
    shards = StageShards(
        model,
        model.tensors(*layers),
        num_chunks_at(plan, program.group.pp),
        program.tp,
        program.tp_index,
        device,
    )
    mine = {chunk: groups[f"reduce.{chunk}"] for chunk in shards.chunks}
    if numerics == "fast":
        return FastReducer(shards, mine, groups["gather"])
    num_replicas, num_microbatches = plan.mesh.dp, plan.batch.microbatches
    nodes = {
        replica: hosted_nodes(
            [*keys, *(() if keep is None else keep.at(stage, replica))],
            num_replicas,
            num_microbatches,
        )
        for replica, keys in weights_run_by(plan, stage).items()
    }
    of_rank = {
        rank: nodes[group.replica]
        for group in plan.groups
        if group.pp == program.group.pp
        for rank in group.ranks
    }
    return OrderedReducer(shards, mine, groups["gather"], of_rank, num_replicas, num_microbatches)
