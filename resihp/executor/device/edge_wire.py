"""A wire of a device that runs behind the host: a queue per directed pair of ranks.

Sends and receives are issued by the compute stream's thread, at their place in the program: so
the messages of a pair are queued in the same order on both sides, and a receive buffer lives from
there on, as the plan says. Messages wait for their tensor on the device, on the queue of their
pair; compute does not wait for them, nor does the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from resihp.errors import GenerationClosed, PeerLost
from resihp.executor.device.interface import Tag
from resihp.executor.stream import Event, Stream

if TYPE_CHECKING:
    from resihp.executor.device.issuing import DeviceQueue

__all__ = ["EdgeWire", "KeptQueues", "Link"]

_Queue = TypeVar("_Queue", bound="DeviceQueue")


class Link(Protocol):
    """This rank's end of one directed pair. `queue` is for nothing else."""

    @property
    def queue(self) -> DeviceQueue:
        """What the pair's messages are queued on."""
        ...

    def send(self, tensor: Any) -> None:
        """Queue a message on `queue`, which is active."""
        ...

    def receive(self, num_bytes: int) -> Any:
        """Queue the next message into a new buffer of `queue`'s pool; `queue` is active."""
        ...


class KeptQueues(Generic[_Queue]):
    """Queues for the pairs of every generation, each made once.

    A device has few, and hands out the first again after the last: then a pair and `comm` would
    share one, and each could wait for what is behind it. What a generation leaves in a queue ends
    with its links, before what the next one queues there.
    """

    def __init__(self, make: Callable[[], _Queue]) -> None:
        self._make = make
        self._made: list[_Queue] = []

    def first(self, number: int) -> list[_Queue]:
        """As many different queues, the same ones in every generation."""
        while len(self._made) < number:
            self._made.append(self._make())
        return self._made[:number]


class EdgeWire:
    """`interface.Wire` of one generation, for tensors that the compute stream makes or uses."""

    def __init__(
        self, compute: Stream, outgoing: Mapping[int, Link], incoming: Mapping[int, Link]
    ) -> None:
        """Links by peer."""
        self._compute = compute
        self._outgoing = dict(outgoing)
        self._incoming = dict(incoming)
        self._has_ended = False

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """See `Wire`; the event happens when the message is queued, its memory is safe then.

        `source` is of the compute stream, from before this call.
        """
        sent = Event()
        link = self._outgoing.get(peer)

        def post() -> None:
            assert source.done, "a send before its tensor"
            if link is None or self._has_ended:
                raise self._refusal(peer)
            tensor = source.wait() if cut is None else cut(source.wait())
            with link.queue.active():
                if source.mark is not None:
                    link.queue.wait(source.mark)
                link.queue.uses(tensor)
                link.send(tensor)
                sent.mark = link.queue.record()
            sent.set()

        self._issue(post, sent)
        return sent

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """See `Wire`; the event happens when the receive is queued."""
        arrived = Event()
        link = self._incoming.get(peer)

        def post() -> None:
            if link is None or self._has_ended:
                raise self._refusal(peer)
            with link.queue.active():
                buffer = link.receive(num_bytes)
                arrived.mark = link.queue.record()
            arrived.set(buffer)

        self._issue(post, arrived)
        return arrived

    def _issue(self, post: Callable[[], None], event: Event) -> None:
        def give_up(issued: Event) -> None:
            if issued.error is not None:
                event.fail(issued.error)

        self._compute.submit(post).when_done(give_up)

    def _refusal(self, peer: int) -> Exception:
        if self._has_ended:
            return GenerationClosed("the generation is over")
        return PeerLost(f"no link between this rank and rank {peer}")

    def end(self) -> None:
        """Nothing more is issued; what is queued ends with its links."""
        self._has_ended = True
