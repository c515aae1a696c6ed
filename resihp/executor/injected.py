"""A work and a wire that suffer from injected faults: slower, later, or ended in the middle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from resihp.executor.device.interface import Tag, Wire
from resihp.executor.faults import Conditions
from resihp.executor.inject import Injector
from resihp.executor.model import Key
from resihp.executor.stream import Event
from resihp.executor.work import Payload, Work
from resihp.ir.program import TensorType
from resihp.wire.messages import StepRecord

__all__ = ["InjectedWire", "InjectedWork"]


class InjectedWork:
    """`Work` that is slowed down, and struck in the vote, after it and in the update."""

    def __init__(self, work: Work, injector: Injector) -> None:
        self._work = work
        self._injector = injector
        self._step = -1

    def begin(self, step: int) -> None:
        """See `Work`."""
        self._step = step
        self._work.begin(step)

    def forward(self, stage: int, key: Key, x: Payload | None) -> Payload | None:
        """See `Work`."""
        return self._slowed(lambda: self._work.forward(stage, key, x))

    def backward_input(self, stage: int, key: Key, dy: Payload | None) -> Payload | None:
        """See `Work`."""
        return self._slowed(lambda: self._work.backward_input(stage, key, dy))

    def backward_weight(self, stage: int, key: Key) -> None:
        """See `Work`."""
        self._slowed(lambda: self._work.backward_weight(stage, key))

    def num_bytes(self, tensor: TensorType) -> int:
        """See `Work`."""
        return self._work.num_bytes(tensor)

    def chunk(self, payload: Payload, chunk: int, num_chunks: int) -> Payload:
        """See `Work`."""
        return self._work.chunk(payload, chunk, num_chunks)

    def arrived(self, raw: Any, num_chunks: int) -> Payload:
        """See `Work`."""
        return self._work.arrived(raw, num_chunks)

    def gather(self, stage: int, chunks: Sequence[Payload]) -> Payload:
        """See `Work`."""
        return self._work.gather(stage, chunks)

    def reduce(self, stage: int) -> None:
        """See `Work`."""
        self._work.reduce(stage)

    def vote(self) -> None:
        """See `Work`."""
        _meanwhile(self._injector.at("vote", self._step))
        self._work.vote()
        strike = self._injector.at("voted", self._step)
        if strike is not None:
            strike()

    def apply(self) -> None:
        """See `Work`."""
        _meanwhile(self._injector.at("update", self._step))
        self._work.apply()

    def record(self) -> StepRecord:
        """See `Work`."""
        return self._work.record()

    def discard(self) -> None:
        """See `Work`."""
        self._work.discard()

    def _slowed(self, compute: Callable[[], Payload | None]) -> Payload | None:
        factor = self._injector.conditions.slowness.now
        if factor == 1.0:
            return compute()
        began_s = time.perf_counter()
        made = compute()
        time.sleep((factor - 1) * (time.perf_counter() - began_s))
        return made


def _meanwhile(strike: Callable[[], None] | None) -> None:
    """Strike while this thread goes on."""
    if strike is not None:
        threading.Thread(target=strike, daemon=True).start()


class InjectedWire:
    """`Wire` whose messages leave later."""

    def __init__(self, wire: Wire, conditions: Conditions) -> None:
        self._wire = wire
        self._conditions = conditions
        self._loop = asyncio.get_running_loop()

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""
        if self._conditions.link_delay_s.now:
            source = self._later(source)
        return self._wire.send(peer, tag, source, cut)

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`."""
        return self._wire.receive(peer, tag, num_bytes)

    def _later(self, source: Event) -> Event:
        """What happens as `source` does, but later by the delay of that moment."""
        late = Event()

        def happen() -> None:
            if source.error is not None:
                late.fail(source.error)
            else:
                late.set(source.wait())

        def happened(_: Event) -> None:
            delay_s = self._conditions.link_delay_s.now
            self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, happen)

        source.when_done(happened)
        return late
