"""Messages between ranks of one process: each is on its way for its time, and queues for nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import Clock
from resihp.executor.stream import Event

__all__ = ["EmulatedWire", "Post"]

_Address = tuple[int, int, Tag]
"""(sender, receiver, tag)."""


class Post:
    """What is on its way between all ranks of this process."""

    def __init__(self) -> None:
        self._waiting: dict[_Address, Event] = {}
        self._arrived: dict[_Address, tuple[Any, int]] = {}

    def receive(self, address: _Address) -> Event:
        """An event for what arrives, or has arrived, under `address`."""
        event = Event()
        if address in self._arrived:
            message, time_ns = self._arrived.pop(address)
            event.set(message, at_ns=time_ns)
        else:
            assert address not in self._waiting, f"two receives of {address}"
            self._waiting[address] = event
        return event

    def deliver(self, address: _Address, message: Any, time_ns: int) -> None:
        """`message` arrives."""
        event = self._waiting.pop(address, None)
        if event is None:
            assert address not in self._arrived, f"two messages under {address}"
            self._arrived[address] = message, time_ns
        else:
            event.set(message, at_ns=time_ns)

    def end(self, error: BaseException) -> None:
        """Fail whatever is waited for, and forget what is on its way."""
        waiting, self._waiting = self._waiting, {}
        self._arrived.clear()
        for event in waiting.values():
            event.fail(error)


class EmulatedWire:
    """`resihp.executor.device.interface.Wire` of one rank."""

    def __init__(self, rank: int, clock: Clock, post: Post, lasts_ns: Callable[[Tag], int]) -> None:
        """`lasts_ns` says how long a message that this rank sends is on its way."""
        self._rank = rank
        self._clock = clock
        self._post = post
        self._lasts_ns = lasts_ns

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`."""
        sent = Event()
        address = self._rank, peer, tag

        def leave(source: Event) -> None:
            if source.error is not None:
                sent.fail(source.error)
                return
            message = source.wait()
            if cut is not None:
                message = cut(message)

            def arrive(time_ns: int) -> None:
                self._post.deliver(address, message, time_ns)
                sent.set(at_ns=time_ns)

            self._clock.at(source.at_ns + self._lasts_ns(tag), arrive)

        source.when_done(leave)
        return sent

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`."""
        return self._post.receive((peer, self._rank, tag))
