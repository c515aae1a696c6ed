"""Moves state from one layout to the next, as the plan's reconfigure block says.

Both ends derive the same list of moves from the two plans. A move carries parameters and both
moments of one layer's chunk (or of its replicated tensors), in parcels of bounded size. The target
asks for them, a few at a time, and puts each where it belongs before it asks for one more: so
nothing comes that it has no memory for, and neither end holds more than those few. Each parcel
ends with its checksum, which the target compares.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from resihp.config import JobConfig
from resihp.errors import CommError
from resihp.executor.checksum import SUM_BYTES, opened_parcel, sealed_parcel
from resihp.executor.device.interface import STATE, Tag, Wire
from resihp.executor.flat import FP32_BYTES, split_flat, tensor_of
from resihp.executor.layouts import local_shape, slice_of
from resihp.executor.model import Model
from resihp.executor.parcels import Parcel, parcels_of
from resihp.executor.snapshots.format import NUM_KINDS
from resihp.executor.state import Holding, empty_optimizer, holding_of
from resihp.executor.stream import Event, Stream
from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.ir.reshard import ShardMove, chunks_of_member, num_state_chunks, transfers

__all__ = ["Resharding"]

MESSAGE_BYTES = 16 << 20
"""Upper limit of a message: large enough to cost little, small enough for several at a time."""
NUM_ASKED = 4
"""Messages that a target waits for at a time from one source."""


class _Message(NamedTuple):
    """A part of a move on its way."""

    move: ShardMove
    parcel: Parcel
    tag: Tag


class _Ends(NamedTuple):
    """Where messages come and go, and where they are packed and unpacked."""

    wire: Wire
    stream: Stream


class _Sources:
    """What this rank can give: what it held itself, and what snapshots of lost ranks hold."""

    def __init__(self, own: Holding | None, lost: Callable[[int], Holding]) -> None:
        self._own = own
        self._lost = lost
        self._read: dict[int, Holding] = {}

    def of(self, move: ShardMove) -> Holding:
        """Where a piece lies. On the stream's thread: it may read files."""
        rank = move.snapshot_of
        if rank is None:
            assert self._own is not None, "asked to send state that is not here"
            return self._own
        if rank not in self._read:
            self._read[rank] = self._lost(rank)
        return self._read[rank]


def _no_snapshots(rank: int) -> Holding:
    raise CommError(f"no snapshot of rank {rank} can be read here")


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
        *,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """`message_bytes` is the same on all ranks."""
        self._model = model
        self._device = device
        self._job = job
        self._rank = rank
        self._message_bytes = message_bytes
        self._num_chunks = num_state_chunks(previous, plan)
        # A layer of the user's own may have no tensor that is cut, or none that is not.
        self.moves = tuple(
            move
            for move in transfers(previous, plan)
            if self._names(move.layer, replicated=move.replicated)
        )
        self.received_bytes = 0

    async def run(
        self,
        old: Holding | None,
        program: Program | None,
        wire: Wire,
        stream: Stream,
        lost: Callable[[int], Holding] = _no_snapshots,
    ) -> Holding | None:
        """Send what others lack, receive what we lack; the new holding (None: standby).

        `wire` is connected to `peers`. `old` is not changed. `lost` reads what a lost rank held
        out of its snapshot. The number of updates is for `TrainState.prepare` to set. Raises an
        ExceptionGroup of CommError or PeerLost where a peer or a snapshot is gone, or where state
        changed on its way.
        """
        stays = old is not None and program is not None and _same_place(old.program, program)
        new: Holding | None = None
        if program is not None and not stays:
            new = await stream.submit(lambda: self._begun(old, program)).wait_async()
        ends = _Ends(wire, stream)
        async with asyncio.TaskGroup() as tasks:
            sources = _Sources(old, lost)
            for target, messages in self._messages(lambda move: (move.source, move.target)):
                if target != self._rank:
                    tasks.create_task(self._give(sources, target, messages, ends))
            for source, messages in self._messages(lambda move: (move.target, move.source)):
                assert new is not None, "state comes to a rank that needs none"
                if source != self._rank:
                    tasks.create_task(self._take(new, source, messages, ends))
                else:
                    tasks.create_task(self._read(new, sources, messages, ends))
        if program is None:
            return None
        if new is None:
            assert old is not None
            return old._replace(program=program)
        made = new
        return await stream.submit(lambda: holding_of(program, made.optimizer)).wait_async()

    @property
    def peers(self) -> set[int]:
        """Ranks that this one sends state to or asks for it."""
        pairs = ((move.source, move.target) for move in self.moves)
        return {rank for pair in pairs if self._rank in pair for rank in pair} - {self._rank}

    # --- messages

    def _messages(
        self, ends_of: Callable[[ShardMove], tuple[int, int]]
    ) -> Iterable[tuple[int, Iterator[_Message]]]:
        """What we send or receive, by peer; `ends_of` tells our end of a move and the other one."""
        moves: dict[int, list[int]] = {}
        for number, move in enumerate(self.moves):
            ours, peer = ends_of(move)
            if ours == self._rank:
                moves.setdefault(peer, []).append(number)
        return [(peer, self._cut(numbers)) for peer, numbers in moves.items()]

    def _cut(self, numbers: Iterable[int]) -> Iterator[_Message]:
        for number in numbers:
            move = self.moves[number]
            shapes = (
                (name, local_shape(self._model.layout(name), move.num_chunks, move.chunk))
                for name in self._names(move.layer, replicated=move.replicated)
            )
            parcels = parcels_of(shapes, NUM_KINDS, (self._message_bytes - SUM_BYTES) // FP32_BYTES)
            for place, parcel in enumerate(parcels):
                yield _Message(move, parcel, Tag(STATE, number, 0, 0, place, 0))

    async def _give(
        self, sources: _Sources, target: int, messages: Iterable[_Message], ends: _Ends
    ) -> None:
        for message in messages:
            await ends.wire.receive(target, _ready_for(message), 1).wait_async()
            packed = ends.stream.submit(partial(self._pack, sources, message))
            ends.wire.send(target, message.tag, packed)
            await packed.wait_async()

    async def _read(
        self, new: Holding, sources: _Sources, messages: Iterable[_Message], ends: _Ends
    ) -> None:
        """Pieces out of snapshots that this rank reads for itself."""
        for message in messages:
            copied = ends.stream.submit(partial(self._copy, new, sources, message))
            await copied.wait_async()

    async def _take(
        self, new: Holding, source: int, messages: Iterable[_Message], ends: _Ends
    ) -> None:
        asked: deque[tuple[_Message, Event]] = deque()

        async def put_first() -> None:
            message, arrived = asked.popleft()
            await arrived.wait_async()
            await ends.stream.submit(partial(self._put, new, message, arrived)).wait_async()

        for message in messages:
            if len(asked) == NUM_ASKED:
                await put_first()
            num_bytes = FP32_BYTES * message.parcel.num_elements + SUM_BYTES
            asked.append((message, ends.wire.receive(source, message.tag, num_bytes)))
            ends.wire.send(source, _ready_for(message), _ready())
        while asked:
            await put_first()

    # --- on the stream

    def _names(self, layer: int, *, replicated: bool) -> list[str]:
        names = self._model.tensors(layer, layer)
        return [name for name in names if (self._model.layout(name).dim is None) == replicated]

    def _blocks(self, holding: Holding, message: _Message) -> list[Tensor]:
        """Views of what a message carries, inside `holding`; the same order at both ends."""
        move, kinds = message.move, holding.kinds()
        found: list[Tensor] = []
        for name, kind, where, _ in message.parcel.blocks:
            tensor = kinds[kind][name]
            piece = self._slice(holding.program, name, tensor, move.chunk, move.num_chunks)
            found.append(piece[where])
        return found

    def _pack(self, sources: _Sources, message: _Message) -> Tensor:
        blocks = self._blocks(sources.of(message.move), message)
        return sealed_parcel([block.reshape(-1).to(self._device) for block in blocks])

    def _put(self, new: Holding, message: _Message, arrived: Event) -> None:
        flat = opened_parcel(tensor_of(arrived.wait(), torch.float32))
        if flat is None:
            move = message.move
            raise CommError(f"state of layer {move.layer} from rank {move.source} came changed")
        blocks = self._blocks(new, message)
        parts = split_flat(flat, [block.numel() for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            block.copy_(part.view(block.shape))
        self.received_bytes += FP32_BYTES * flat.numel()

    def _copy(self, new: Holding, sources: _Sources, message: _Message) -> None:
        blocks = self._blocks(sources.of(message.move), message)
        for block, source in zip(self._blocks(new, message), blocks, strict=True):
            block.copy_(source)
        self.received_bytes += FP32_BYTES * message.parcel.num_elements

    def _begun(self, old: Holding | None, program: Program) -> Holding:
        """Memory for the new layout, with what this rank held before."""
        optimizer = empty_optimizer(self._model, self._job.optimizer, program, self._device)
        new = Holding(program, optimizer, {})
        if old is not None:
            self._keep(old, new)
        return new

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


def _ready_for(message: _Message) -> Tag:
    """Under which the target says that it waits for `message`."""
    return message.tag._replace(chunk=1)


def _ready() -> Event:
    """What it says is one byte of nothing."""
    event = Event()
    event.set(torch.zeros(1, dtype=torch.uint8))
    return event


def _same_place(old: Program, new: Program) -> bool:
    return (old.layers, old.tp, old.tp_index) == (new.layers, new.tp, new.tp_index)


def _chunks(program: Program, num_chunks: int) -> set[int]:
    return set(chunks_of_member(program.tp_index, program.tp, num_chunks))
