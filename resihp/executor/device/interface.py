"""What a device gives to the interpreter and to a session: streams, a wire, groups.

The interpreter and all work run the same code on every device; what differs is in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resihp.executor.stream import Event, Stream

if TYPE_CHECKING:  # emulated devices start without torch
    import torch
    from torch import Tensor

    from resihp.ir.model import Plan
    from resihp.wire.address import Address

__all__ = ["SNAPSHOT", "STATE", "Communicator", "Device", "Groups", "Tag", "Wire"]


class Tag(NamedTuple):
    """What a message is. With the peer it is unique in a generation."""

    kind: int
    """Number of the `Op` that sends it, or STATE for resharding."""
    step: int
    stage: int
    """Stage that made the tensor; 0 for STATE."""
    home: int
    microbatch: int
    chunk: int


SNAPSHOT = 254
"""`Tag.kind` of a snapshot on its way to another node."""
STATE = 255
"""`Tag.kind` of a piece of state; every other kind is the number of an `Op`."""


class Wire(Protocol):
    """Messages between two ranks of a generation. Methods are for the event loop's thread.

    Nothing here blocks. `send` and `receive` are called in the order of the program, so a wire
    that matches by order (NCCL) may rely on it; others match by tag.
    """

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """Post `cut(result of source)` (None: the result itself) once `source` has happened.

        What is sent is contiguous and stays unchanged and alive until the returned event: it
        happens when the tensor is sent, so that its memory is free, and says nothing of its
        arrival. It fails with the error of `source`, and with `PeerLost` where the peer is gone;
        nobody has to look. `cut` is cheap and may run on any thread.
        """
        ...

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """An event whose result is the message of `num_bytes` that `peer` sends under `tag`.

        On CPU the result is a writable buffer, on other devices a flat byte tensor; it belongs to
        the caller. The event fails with `CommError` where the message has another size, with
        `PeerLost` where the peer is gone, with `GenerationClosed` where the generation ends.
        """
        ...


class Communicator(Protocol):
    """A group of ranks in which this process is member `index`.

    Each has one issuing stream, in program order (DESIGN §3.3). On CPU a method returns when its
    result is there; on CUDA when it is queued on the current stream.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global numbers of the members."""
        ...

    @property
    def index(self) -> int:
        """Which member this process is."""
        ...

    @property
    def degree(self) -> int:
        """Number of members."""
        ...

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the members, in place. All members get the same bits."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Parts of equal shape of all members, stacked in member order: [members, *part]."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the flat `parts[j]` to member j; the parts of `sizes[j]` elements received."""
        ...


class Groups(Protocol):
    """The communicators of one generation; every member builds the same ones in the same order."""

    def build(self, name: str, ranks: Sequence[int]) -> Communicator:
        """The group `name` over `ranks`, of which we are one. Blocks; CommError where one fails."""
        ...

    def abort(self) -> None:
        """Wake whatever is pending on any group, here and at the other members. Thread-safe."""
        ...

    def release(self) -> None:
        """Let everything go; may take long, so never on the event loop."""
        ...


class Device(Protocol):
    """The device of one rank, for the life of its process."""

    @property
    def kind(self) -> str:
        """`cpu`, `cuda` or `emulated`: what every output calls it."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def transport(self) -> str:
        """What its wire promises, as `resihp.ir.transport` spells it; plans are proved under it."""
        ...

    @property
    def compute(self) -> Stream:
        """F, B, W and the update, with the collectives inside them."""
        ...

    @property
    def comm(self) -> Stream:
        """Gathers, reductions and the vote."""
        ...

    @property
    def host(self) -> str:
        """Address of the interface that this device uses."""
        ...

    async def open(self) -> Address:
        """Get ready to be connected to; where peers reach the wire."""
        ...

    def begin(self, generation: int, key: bytes, peers: Mapping[int, Address]) -> None:
        """Start a generation whose live ranks listen at `peers`."""
        ...

    async def connect(self, peers: AbstractSet[int]) -> None:
        """Make ready to send to `peers`; an ExceptionGroup of PeerLost where one is gone."""
        ...

    def end(self) -> None:
        """End the generation: every pending send and receive fails, connections are closed."""
        ...

    @property
    def wire(self) -> Wire:
        """The wire of the generation that was begun, for activations, gradients and state."""
        ...

    def groups(
        self, store: Address, generation: int, rank: int, *, connect_s: float, collective_s: float
    ) -> Groups:
        """The groups of a generation over its `store`. Blocks while it connects."""
        ...

    def link(self, groups: Groups, plan: Plan) -> None:
        """Make what the wire needs to carry the tensors of `plan`, at the same time on all ranks.

        After all groups were built, before `wire` is read for tensors. Blocks; CommError where a
        peer is gone.
        """
        ...
