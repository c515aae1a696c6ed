"""All ranks of a plan as threads that run their programs straight on, one instruction at a time.

The obvious interpreter: a send puts its tensor into a box, a receive waits for it there. Sends do
not block, so a verified plan ends.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from exchange import FAR_S, run_ranks
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.flat import bytes_of
from resihp.executor.model import Model
from resihp.executor.work import Key, Work
from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan
from resihp.ir.program import Program
from resihp.wire.messages import StepRecord

Tensors = dict[str, Tensor]
_SENT_BY = {Op.RECV_ACT: Op.SEND_ACT, Op.RECV_GRAD: Op.SEND_GRAD}
_FAR = {Op.RECV_ACT: -1, Op.RECV_GRAD: 1}


class Boxes:
    """Messages by where they go and what they are."""

    def __init__(self) -> None:
        self._boxes: defaultdict[tuple[object, ...], queue.Queue[bytearray]] = defaultdict(
            queue.Queue
        )

    def put(self, tensor: Tensor, *address: object) -> None:
        self._boxes[address].put(bytearray(bytes_of(tensor.contiguous())))

    def get(self, *address: object) -> bytearray:
        return self._boxes[address].get(timeout=FAR_S)


class _Iteration:
    """One rank's tensors on their way through its program."""

    def __init__(self, program: Program, work: Work, boxes: Boxes, step: int) -> None:
        self._program, self._work, self._boxes, self._step = program, work, boxes, step
        self._made: dict[tuple[str, int, Key], Tensor | None] = {}
        """Outputs ("F", "B") of a stage here, by the stage that made them."""
        self._arrived: dict[tuple[Op, int, Key], list[Tensor]] = {}

    def run(self) -> StepRecord:
        work, made = self._work, self._made
        work.begin(self._step)
        for instr in self._program.instrs:
            op = instr.op
            if op is Op.STEP:
                work.vote()
                work.apply()
                continue
            assert instr.stage is not None
            stage, key = instr.stage, (instr.home or 0, instr.microbatch or 0)
            if op is Op.F:
                x = self._input(Op.RECV_ACT, "F", stage - 1, stage, key)
                made["F", stage, key] = work.forward(stage, key, x)
            if op in (Op.B, Op.BW):
                dy = self._input(Op.RECV_GRAD, "B", stage + 1, stage, key)
                made["B", stage, key] = work.backward_input(stage, key, dy)
            if op in (Op.W, Op.BW):
                work.backward_weight(stage, key)
            for transfer in instr.transfers:
                self._transfer(op, stage, key, transfer.peer, transfer.chunk, instr.num_chunks)
            if op in (Op.GATHER_ACT, Op.GATHER_GRAD) and instr.num_chunks > 1:
                received = Op.RECV_ACT if op is Op.GATHER_ACT else Op.RECV_GRAD
                place = received, stage, key
                self._arrived[place] = [work.gather(stage, self._arrived[place])]
            if op is Op.REDUCE_GRADS:
                work.reduce(stage)
        return work.record()

    def _input(self, op: Op, kind: str, maker: int, stage: int, key: Key) -> Tensor | None:
        if (op, stage, key) in self._arrived:
            (whole,) = self._arrived.pop((op, stage, key))
            return whole
        return self._made.pop((kind, maker, key), None)

    def _transfer(
        self, op: Op, stage: int, key: Key, peer: int, chunk: int, num_chunks: int
    ) -> None:
        rank = self._program.rank
        if op in _SENT_BY:
            raw = self._boxes.get(rank, peer, _SENT_BY[op], stage + _FAR[op], key, chunk)
            part = self._work.arrived(raw, num_chunks)
            self._arrived.setdefault((op, stage, key), []).append(part)
        else:
            tensor = self._made["F" if op is Op.SEND_ACT else "B", stage, key]
            assert tensor is not None
            self._boxes.put(
                self._work.chunk(tensor, chunk, num_chunks), peer, rank, op, stage, key, chunk
            )


def run_straight(
    model: Model,
    plan: Plan,
    work_of: Callable[[Program, Mapping[str, Communicator]], Work],
    steps: Sequence[int],
) -> dict[int, list[StepRecord]]:
    """The records of every rank; `work_of` makes a rank's work from its program and groups."""
    boxes = Boxes()

    def run(rank: int, groups: Mapping[str, Communicator]) -> list[StepRecord]:
        program = expand(plan, rank)
        work = work_of(program, groups)
        return [_Iteration(program, work, boxes, step).run() for step in steps]

    return run_ranks(model, plan, run)
