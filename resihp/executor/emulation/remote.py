"""Emulated ranks in processes of their own: their messages and meetings go over the real transport.

Payloads are small: they say what they are and when they are due, on the clock that all processes
of a machine share. What comes with less delay than `FORGIVEN_NS` counts as come in time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import FORGIVEN_NS, Clock
from resihp.executor.emulation.work import EmulatedTensor
from resihp.executor.stream import Event
from resihp.executor.transport import Transport

__all__ = ["RemoteMeeting", "RemoteWire"]

_TENSOR = struct.Struct("!q?HHIHH")  # due, is gradient, stage, home, micro-batch, chunk, chunks
_COME = struct.Struct("!qqB")  # start, lasts, what it brings
_END = struct.Struct("!qB")  # when, what all brought
_COMES, _ENDS = 64, 128
"""Added to the kind of a tag: of who comes to a meeting, and of its end."""


class RemoteWire:
    """`resihp.executor.device.interface.Wire` of one rank."""

    def __init__(self, clock: Clock, transport: Transport, lasts_ns: Callable[[Tag], int]) -> None:
        """`lasts_ns` says how long a message that this rank sends is on its way."""
        self._clock = clock
        self._transport = transport
        self._lasts_ns = lasts_ns

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""

        def packed(tensor: EmulatedTensor) -> bytes:
            what: EmulatedTensor = tensor if cut is None else cut(tensor)
            return _TENSOR.pack(
                source.at_ns + self._lasts_ns(tag),
                what.is_gradient,
                what.stage,
                *what.key,
                what.chunk,
                what.num_chunks,
            )

        return self._transport.send(peer, tag, source, packed)

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`. It happens when the message is due."""
        due = Event()

        def come(raw: Event) -> None:
            if raw.error is not None:
                due.fail(raw.error)
                return
            due_ns, is_gradient, stage, home, number, chunk, num_chunks = _TENSOR.unpack(raw.wait())
            tensor = EmulatedTensor(is_gradient, stage, (home, number), chunk, num_chunks)
            at_ns = _forgiving(self._clock, due_ns)
            self._clock.at(at_ns, lambda time_ns: due.set(tensor, at_ns=time_ns))

        self._transport.receive(peer, tag, _TENSOR.size).when_done(come)
        return due


class RemoteMeeting:
    """See `resihp.executor.emulation.stream.Meeting`: the first member tells all when it ends."""

    def __init__(self, clock: Clock, transport: Transport, tag: Tag, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.missing = set(ranks)
        self.brought = 0
        self._clock = clock
        self._transport = transport
        self._tag = tag
        self._ended = Event()
        self._start_ns = 0
        self._lasts_ns = 0

    def bring(self, bits: int) -> None:
        """See `Meeting`."""
        self.brought |= bits

    def come(self, rank: int, start_ns: int, lasts_ns: int) -> Event:
        """See `Meeting`."""
        first = self.ranks[0]
        if rank == first:
            for other in self.ranks[1:]:
                come = self._transport.receive(other, self._kind(_COMES), _COME.size)
                come.when_done(lambda raw, other=other: self._heard(other, raw))
            self._has_come(rank, start_ns, lasts_ns, self.brought)
        else:
            self._transport.send(
                first, self._kind(_COMES), _happened(_COME.pack(start_ns, lasts_ns, self.brought))
            )
            self._transport.receive(first, self._kind(_ENDS), _END.size).when_done(self._over)
        return self._ended

    def _kind(self, offset: int) -> Tag:
        return self._tag._replace(kind=self._tag.kind + offset)

    def _heard(self, rank: int, raw: Event) -> None:
        if raw.error is not None:
            self._ended.fail(raw.error)
        else:
            self._has_come(rank, *_COME.unpack(raw.wait()))

    def _has_come(self, rank: int, start_ns: int, lasts_ns: int, brought: int) -> None:
        self.missing.remove(rank)
        self.brought |= brought
        self._start_ns = max(self._start_ns, start_ns)
        self._lasts_ns = max(self._lasts_ns, lasts_ns)
        if not self.missing:
            end = _happened(_END.pack(self._start_ns + self._lasts_ns, self.brought))
            for other in self.ranks[1:]:
                self._transport.send(other, self._kind(_ENDS), end)
            self._over(end)

    def _over(self, raw: Event) -> None:
        if raw.error is not None:
            self._ended.fail(raw.error)
            return
        self.missing.clear()
        due_ns, self.brought = _END.unpack(raw.wait())
        end_ns = _forgiving(self._clock, due_ns)
        self._clock.at(end_ns, lambda time_ns: self._ended.set(at_ns=time_ns))


def _happened(payload: bytes) -> Event:
    event = Event()
    event.set(payload)
    return event


def _forgiving(clock: Clock, due_ns: int) -> int:
    """When something is there that was due at `due_ns` and that the host has now."""
    host_ns = clock.host_ns()
    return due_ns if host_ns - due_ns <= FORGIVEN_NS else host_ns
