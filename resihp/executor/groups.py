"""Process groups of one generation, and how to leave them when a member is gone.

Groups are unregistered `ProcessGroupGloo` objects over a store that the lowest rank of the
generation hosts. They are never destroyed on the hot path: a broken one is torn down by a
receive that times out after 1 ms (which wakes every operation pending on it), then dropped.
`abort`, `shutdown` and `destroy_process_group` do not wake anything on gloo.

Each group has one issuing thread, in program order (DESIGN §3.3): `tp` belongs to the compute
stream, all others to the communication stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from resihp.errors import CommError, GenerationClosed
from resihp.executor.flat import split_flat
from resihp.wire.address import LOOPBACK, Address, address_of, listen_at

__all__ = ["Communicator", "GroupFactory", "open_store"]

_gloo: Any = ProcessGroupGloo  # torch's stubs lack half of it
_ABORT_TAG = 2**31 - 1
_SLICE = timedelta(milliseconds=50)


def open_store(timeout_s: float, host: str = LOOPBACK) -> tuple[Any, Address]:
    """A TCPStore on a socket of our own at `host`, and where that is.

    TCPStore binds every interface whatever address it is given, unless it gets the socket.
    """
    listener = listen_at(host)
    address = address_of(listener)
    store = TCPStore(
        address.host,
        address.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout_s),
    )
    return store, address


class Communicator:
    """A gloo group of `ranks` (global numbers) in which this process is member `index`."""

    def __init__(self, group: Any, ranks: Sequence[int], index: int) -> None:
        self._group: Any = group
        self.ranks = tuple(ranks)
        self.index = index
        self._aborted = threading.Event()
        self.num_entered = 0
        """Operations that this member has begun."""

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the members, in place."""
        if self.degree > 1:
            self._wait(lambda: self._group.allreduce([tensor]))

    def all_gather(self, part: Tensor) -> Tensor:
        """Parts of equal shape of all members, stacked in member order: [members, *part]."""
        if self.degree == 1:
            return part.unsqueeze(0)
        out = part.new_empty((self.degree, *part.shape))
        self._wait(lambda: self._group._allgather_base(out.view(-1), part.reshape(-1)))
        return out

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the flat `parts[j]` to member j; the parts of `sizes[j]` elements received."""
        if self.degree == 1:
            return [parts[0]]
        source = torch.cat(list(parts))
        out = source.new_empty(sum(sizes))
        in_sizes = [part.numel() for part in parts]
        self._wait(
            lambda: self._group.alltoall_base(
                out, source, list(sizes), in_sizes, dist.AllToAllOptions()
            )
        )
        return split_flat(out, sizes)

    def _wait(self, start: Callable[[], Any]) -> None:
        """Wait in slices: an abort that meets a send half-way posted does not wake it.

        A wait on a collective that times out leaves it running,
        so an abandoned one ends by itself at the group's own time-out.
        """
        self.num_entered += 1
        try:
            work = start()
            while not self._finished(work):
                if self._aborted.is_set():
                    raise CommError(f"collective over ranks {list(self.ranks)} was aborted")
        except RuntimeError as error:  # gloo raises nothing more precise
            raise CommError(f"collective over ranks {list(self.ranks)} broke: {error}") from error

    def _finished(self, work: Any) -> bool:
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it ended just after the slice: only its own error counts
        return True

    def release(self) -> None:
        """Let the group go; takes some 10 ms per live pair, so not on the event loop."""
        self._group = None

    def abort(self) -> None:
        """Wake whatever is pending on this group, here and at the other members. Thread-safe."""
        group = self._group
        if group is None:
            return
        self._aborted.set()
        try:
            work = group.recv_anysource([torch.empty(1)], _ABORT_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the expected end: the time-out tore the context down


class GroupFactory:
    """Builds the groups of one generation; every member must build the same ones.

    `connect_s` bounds the connecting, `collective_s` each operation; they only matter where no
    verdict of the coordinator comes, since `abort` ends operations much earlier.
    """

    def __init__(
        self,
        store: Address,
        generation: int,
        rank: int,
        host: str = LOOPBACK,
        *,
        connect_s: float,
        collective_s: float,
    ) -> None:
        """Gloo listens at `host` only."""
        self._host = host
        self._connect = timedelta(seconds=connect_s)
        self._collective = timedelta(seconds=collective_s)
        self._rank = rank
        self._generation = generation
        try:
            self._store: Any = TCPStore(
                store.host,
                store.port,
                is_master=False,
                wait_for_workers=False,
                timeout=self._connect,
            )
        except RuntimeError as error:
            raise CommError(f"the store of generation {generation} is gone: {error}") from error
        self._lock = threading.Lock()
        self._closed = False
        self._built: list[Communicator] = []

    def build(self, name: str, ranks: Sequence[int]) -> Communicator:
        """The group `name` over `ranks`, of which we are one. CommError where one is missing."""
        index = list(ranks).index(self._rank)
        if len(ranks) == 1:
            return Communicator(None, ranks, index)
        store = self._store
        if self._closed:
            raise GenerationClosed("the generation is over")
        prefix = PrefixStore(f"g{self._generation}/{name}", store)
        try:
            group = _gloo(prefix, index, len(ranks), self._options())
            group.set_timeout(self._collective)
        except RuntimeError as error:
            raise CommError(f"group {name} over ranks {list(ranks)} failed: {error}") from error
        communicator = Communicator(group, ranks, index)
        with self._lock:
            if not self._closed:
                self._built.append(communicator)
                return communicator
        communicator.release()
        raise GenerationClosed("the generation is over")

    def _options(self) -> Any:
        """Gloo at our address: it would look for one by the machine's name otherwise."""
        options: Any = _gloo._Options()
        options._devices = [_gloo.create_device(hostname=self._host)]
        options._timeout = self._connect
        return options

    def abort(self) -> None:
        """Wake whatever is pending on any group. Each takes some 20 ms: on threads of their own."""
        with self._lock:
            built = list(self._built)
        for communicator in built:
            threading.Thread(target=communicator.abort, daemon=True).start()

    def release(self) -> None:
        """Let everything go, also what is still being built; not on the event loop (see there)."""
        with self._lock:
            self._closed = True
            built, self._built = self._built, []
        self._store = None
        for communicator in built:
            communicator.release()
