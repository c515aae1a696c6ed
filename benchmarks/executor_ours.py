"""Our side of `executor_speed.py`: the interpreter on the order that torch runs.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executor_cases import MODEL, NUM_MICROBATCHES, SEED, Case, loss_scale, micro_batches
from torch import Tensor

from resihp.compiler.lower import lower
from resihp.compiler.schedules import schedule_order
from resihp.executor.device.interface import Device
from resihp.executor.gradients import GradientTree
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.model import Key
from resihp.executor.models.llama import Llama
from resihp.executor.tp import SingleMember
from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan
from resihp.ir.program import TensorType
from resihp.ir.torch_csv import read_torch_csv
from resihp.wire.messages import StepRecord


def plan_of(case: Case, order: Mapping[int, Sequence[Any]] | None) -> Plan:
    """What torch says that it runs, imported; None: 1F1B, for which it has no order."""
    if order is None:
        letters = {Op.F: "F", Op.BW: "B"}
        works = schedule_order("1f1b", case.num_ranks, NUM_MICROBATCHES)
        rows = [[f"{w.stage}{letters[w.op]}{w.microbatch}" for w in row] for row in works]
    else:
        rows = [["" if cell is None else str(cell) for cell in order[r]] for r in sorted(order)]
    return imported(case, rows)


def imported(case: Case, rows: Sequence[Sequence[str]]) -> Plan:
    """The plan of the cells of each rank, as torch writes them."""
    text = "\n".join(map(",".join, rows)) + "\n"
    schedule = read_torch_csv(
        text,
        kind="compute",
        num_microbatches=NUM_MICROBATCHES,
        model=MODEL.shape("benchmark"),
        tokens=case.num_tokens,
    )
    return lower(schedule.plan)


class GradientWork:
    """F, B and W of real stages; the sums of gradients stay where they are.

    The sums are those of the numerics `fast` (like torch's, one for all micro-batches) or `bitwise`
    (a tree over the micro-batches).
    """

    def __init__(self, case: Case, rank: int, numerics: str) -> None:
        model = Llama(MODEL)
        self._batches = micro_batches(case.num_tokens)
        self._scale = loss_scale(self._batches)
        self._shape_TD = (case.num_tokens, MODEL.hidden_size)
        self._stages = {
            number: model.stage(
                first,
                last,
                SingleMember(),
                {name: model.initial(name, SEED) for name in model.tensors(first, last)},
            )
            for number in case.stages[rank]
            for first, last in (case.layers_of(number),)
        }
        self._trees = {stage: GradientTree(1, NUM_MICROBATCHES) for stage in self._stages}
        self._sums = {
            number: {name: torch.zeros_like(value) for name, value in stage.parameters.items()}
            for number, stage in self._stages.items()
            if numerics == "fast"
        }
        self.gradients: dict[str, Tensor] = {}
        """Of the last iteration, by name."""

    def begin(self, step: int) -> None:
        self._step = step
        self.gradients = {}
        for sums in self._sums.values():
            for total in sums.values():
                total.zero_()

    def forward(self, stage: int, key: Key, x: Tensor | None) -> Tensor | None:
        return self._stages[stage].forward(key, self._batches[key[1]], x, loss_scale=self._scale)

    def backward_input(self, stage: int, key: Key, dy: Tensor | None) -> Tensor | None:
        return self._stages[stage].backward_input(key, dy)

    def backward_weight(self, stage: int, key: Key) -> None:
        runs = self._stages[stage]
        if self._sums:
            runs.add_weight_gradients(key, self._sums[stage])
        else:
            self._trees[stage].add(*key, runs.backward_weight(key))

    def num_bytes(self, tensor: TensorType) -> int:
        return tensor.num_bytes

    def chunk(self, payload: Tensor, chunk: int, num_chunks: int) -> Tensor:
        assert num_chunks == 1
        return payload

    def arrived(self, raw: Any, num_chunks: int) -> Tensor:
        return torch.frombuffer(raw, dtype=torch.float32).view(self._shape_TD)

    def gather(self, stage: int, chunks: Sequence[Tensor]) -> Tensor:
        raise AssertionError("nothing is cut at TP degree 1")

    def reduce(self, stage: int) -> None:
        self.gradients |= self._sums[stage] if self._sums else self._trees[stage].take(0)

    def vote(self) -> None: ...

    def apply(self) -> None: ...

    def record(self) -> StepRecord:
        return StepRecord.empty(self._step)

    def discard(self) -> None:
        for stage, tree in self._trees.items():
            self._stages[stage].discard_all()
            tree.discard_all()


class Ours:
    """Our runtime on one rank, in a generation that was begun."""

    def __init__(
        self, case: Case, rank: int, order: Mapping[int, Sequence[Any]] | None, numerics: str
    ) -> None:
        program = expand(plan_of(case, order), rank)
        self.work = GradientWork(case, rank, numerics)
        self.program = program
        self.peers = program.send_targets

    def interpreter(self, device: Device) -> Interpreter:
        """On the streams and the wire of `device`, which is connected to `peers`."""
        return Interpreter(
            self.program,
            self.work,
            compute=device.compute,
            comm=device.comm,
            wire=device.wire,
        )
