"""Moves state from one layout to the next, as the plan's reconfigure block says.

Both ends derive the same list of moves from the two plans. A move carries parameters and both
moments of one layer's chunk (or of its replicated tensors) as one flat message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from resihp.config import JobConfig
from resihp.executor.adamw import AdamW
from resihp.executor.device.interface import STATE, Tag, Wire
from resihp.executor.flat import FP32_BYTES, split_flat, tensor_of
from resihp.executor.layouts import local_shape, slice_of
from resihp.executor.model import Model, tensors_of
from resihp.executor.state import Holding, holding_of
from resihp.executor.stream import Event, Stream
from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.ir.reshard import ShardMove, chunks_of_member, num_state_chunks, transfers

__all__ = ["Resharding", "state_targets"]

NUM_KINDS = 3
"""Parameters and both moments, fp32 all: bf16 copies are made anew where they are needed."""


def state_targets(moves: tuple[ShardMove, ...], rank: int) -> set[int]:
    """Ranks that `rank` sends state to."""
    return {move.target for move in moves if move.source == rank}


class Resharding:
    """One rank's part in the reconfiguration from `previous` to `plan`."""

    def __init__(
        self,
        model: Model,
        job: JobConfig,
        previous: Plan,
        plan: Plan,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._device = device
        self._optimizer = job.optimizer
        self._rank = rank
        self._num_chunks = num_state_chunks(previous, plan)
        # A layer of the user's own may have no tensor that is cut, or none that is not.
        self.moves = tuple(
            move
            for move in transfers(previous, plan)
            if self._names(move.layer, replicated=move.replicated)
        )
        self.received_bytes = 0

    async def run(
        self, old: Holding | None, program: Program | None, wire: Wire, stream: Stream
    ) -> Holding | None:
        """Send what others lack, receive what we lack; the new holding (None: standby).

        `old` is not changed. The number of updates is for `TrainState.prepare` to set. Raises
        `CommError` or `PeerLost` where a peer is gone.
        """
        arriving = [
            (move, wire.receive(move.source, _tag(number), self._num_bytes(move)))
            for number, move in enumerate(self.moves)
            if move.target == self._rank
        ]
        for number, move in enumerate(self.moves):
            if move.source == self._rank:
                assert old is not None, "asked to send state that is not here"
                held = old
                packed = stream.submit(lambda held=held, move=move: self._pack(held, move))
                wire.send(move.target, _tag(number), packed)
                await packed.wait_async()
        if program is None:
            return None
        if old is not None and _same_place(old.program, program):
            assert not arriving
            return old._replace(program=program)
        built = stream.submit(
            lambda: self._build(old, program, arriving), waits=[event for _, event in arriving]
        )
        return await built.wait_async()

    def _num_bytes(self, move: ShardMove) -> int:
        sizes = [
            math.prod(local_shape(self._model.layout(name), move.num_chunks, move.chunk))
            for name in self._names(move.layer, replicated=move.replicated)
        ]
        return NUM_KINDS * FP32_BYTES * sum(sizes)

    def _names(self, layer: int, *, replicated: bool) -> list[str]:
        names = self._model.tensors(layer, layer)
        return [name for name in names if (self._model.layout(name).dim is None) == replicated]

    def _pieces(self, holding: Holding, move: ShardMove) -> Iterator[Tensor]:
        """Views of what `move` carries, inside `holding`; the same order at both ends."""
        for name in self._names(move.layer, replicated=move.replicated):
            for kind in holding.kinds():
                yield self._slice(holding.program, name, kind[name], move.chunk, move.num_chunks)

    def _pack(self, holding: Holding, move: ShardMove) -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in self._pieces(holding, move)])

    def _build(
        self, old: Holding | None, program: Program, arrived: list[tuple[ShardMove, Event]]
    ) -> Holding:
        new = Holding(program, self._empty(program), {})
        if old is not None:
            self._keep(old, new)
        for move, event in arrived:
            pieces = list(self._pieces(new, move))
            flat = tensor_of(event.wait(), torch.float32)
            self.received_bytes += FP32_BYTES * flat.numel()
            parts = split_flat(flat, [piece.numel() for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part.view(piece.shape))
        return holding_of(program, new.optimizer)

    def _empty(self, program: Program) -> AdamW:
        model, where = self._model, (program.tp, program.tp_index)
        names = tensors_of(model, program.layers)
        # NaN, so that a piece that nobody filled in can never pass for state.
        parameters, exp_avg, exp_avg_sq = (
            {
                name: torch.full(
                    local_shape(model.layout(name), *where), float("nan"), device=self._device
                )
                for name in names
            }
            for _ in range(NUM_KINDS)
        )
        return AdamW(self._optimizer, parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def _keep(self, old: Holding, new: Holding) -> None:
        """Copy what both layouts hold on this rank."""
        num = self._num_chunks
        both = _chunks(old.program, num) & _chunks(new.program, num)
        for name in new.parameters:
            if name not in old.parameters:
                continue
            pieces = [0] if self._model.layout(name).dim is None else both
            for into, source in zip(new.kinds(), old.kinds(), strict=True):
                for chunk in pieces:
                    target = self._slice(new.program, name, into[name], chunk, num)
                    target.copy_(self._slice(old.program, name, source[name], chunk, num))

    def _slice(
        self, program: Program, name: str, tensor: Tensor, chunk: int, num_chunks: int
    ) -> Tensor:
        layout = self._model.layout(name)
        return slice_of(layout, tensor, chunk, num_chunks, program.tp, program.tp_index)


def _tag(number: int) -> Tag:
    return Tag(
        kind=STATE, step=number, stage=0, home=0, microbatch=0, chunk=0
    )  # 32 bits wide there


def _same_place(old: Program, new: Program) -> bool:
    return (old.layers, old.tp, old.tp_index) == (new.layers, new.tp, new.tp_index)


def _chunks(program: Program, num_chunks: int) -> set[int]:
    return set(chunks_of_member(program.tp_index, program.tp, num_chunks))
