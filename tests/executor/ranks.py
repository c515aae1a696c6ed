"""Real processes that build real gloo groups, told step by step what to do.

One process imports torch and forks all others (multiprocessing's fork server), so that a rank
costs milliseconds. It has a single thread and no group when it forks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from resihp.executor.groups import Communicator, GroupFactory, open_store
from resihp.wire.address import Address

FAR_S = 30.0
"""Nothing in these tests takes this long unless it hangs."""


class Member:
    """What one rank can be told, in its own process. Replies are plain values or errors."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.groups: dict[str, Communicator] = {}
        self._store: Any = None
        self._pending: threading.Thread | None = None
        self._outcome: object = None

    def host(self, timeout_s: float) -> Address:
        self._store, address = open_store(timeout_s)
        return address

    def close_store(self) -> None:
        self._store = None

    def join(
        self, store: Address, generation: int, timeout_s: float, names: Mapping[str, Sequence[int]]
    ) -> None:
        factory = GroupFactory(
            store, generation, self.rank, connect_s=timeout_s, collective_s=timeout_s
        )
        self.groups = {name: factory.build(name, ranks) for name, ranks in names.items()}

    def all_reduce(self, name: str, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values)
        self.groups[name].all_reduce_(tensor)
        return tensor.tolist()

    def all_gather(self, name: str, values: Sequence[Sequence[float]]) -> Any:
        return self.groups[name].all_gather(torch.tensor(values, dtype=torch.float64)).tolist()

    def all_to_all(
        self, name: str, parts: Sequence[Sequence[float]], sizes: Sequence[int]
    ) -> list[list[float]]:
        tensors = [torch.tensor(part) for part in parts]
        return [part.tolist() for part in self.groups[name].all_to_all(tensors, sizes)]

    def begin(self, name: str, what: str = "all_reduce") -> None:
        """Enter a collective without waiting for it, as a stream's thread does."""
        group = self.groups[name]
        tensor = torch.ones(1 << 16)
        count = group.degree
        work: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce_(tensor),
            "all_gather": lambda: group.all_gather(tensor),
            "all_to_all": lambda: group.all_to_all([tensor] * count, [tensor.numel()] * count),
        }

        def run() -> None:
            try:
                work[what]()
                self._outcome = "done"
            except Exception as error:
                self._outcome = type(error).__name__

        self._pending = threading.Thread(target=run, daemon=True)
        self._pending.start()

    def outcome(self) -> object:
        """How the collective ended that was begun; 'pending' after FAR_S."""
        assert self._pending is not None
        self._pending.join(FAR_S)
        return "pending" if self._pending.is_alive() else self._outcome

    def is_pending(self) -> bool:
        assert self._pending is not None
        return self._pending.is_alive()

    def abort(self, name: str) -> None:
        self.groups[name].abort()

    def release(self) -> None:
        for group in self.groups.values():
            group.release()
        self.groups = {}


def serve(rank: int, pipe: Connection) -> None:
    """The process of one rank: obey until the pipe closes."""
    member = Member(rank)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # a normal exit would wait for a group that is stuck
        try:
            pipe.send(getattr(member, name)(*arguments))
        except Exception as error:
            pipe.send(error)


class Team:
    """Ranks 0 .. count - 1. Close it, or use it in a `with`."""

    def __init__(self, count: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self._processes):
            process.kill()
            process.join()
            process.close()
            self._pipes[rank].close()

    def tell(self, rank: int, what: str, *arguments: object) -> None:
        """Say what to do; `answer` reads what came of it."""
        self._pipes[rank].send((what, arguments))

    def answer(self, rank: int) -> Any:
        """The reply to the oldest order of `rank`; raises the error that it ended with."""
        assert self._pipes[rank].poll(2 * FAR_S), f"rank {rank} does not answer"
        reply = self._pipes[rank].recv()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask(self, rank: int, what: str, *arguments: object) -> Any:
        """Say what to do and wait for it."""
        self.tell(rank, what, *arguments)
        return self.answer(rank)

    def ask_all(self, ranks: Sequence[int], what: str, *arguments: object) -> list[Any]:
        """All at once, as a collective needs."""
        for rank in ranks:
            self.tell(rank, what, *arguments)
        return [self.answer(rank) for rank in ranks]

    def build(
        self,
        ranks: Sequence[int],
        generation: int = 1,
        timeout_s: float = 4 * FAR_S,
        names: Mapping[str, Sequence[int]] | None = None,
    ) -> Address:
        """Groups over all `ranks` (one called "world"), hosted by the lowest; its store."""
        store = self.ask(ranks[0], "host", timeout_s)
        self.ask_all(ranks, "join", store, generation, timeout_s, names or {"world": ranks})
        return store

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait for the end."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def stop(self, rank: int) -> None:
        """SIGSTOP, and wait until the kernel shows it."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        while _state(pid) != "T":
            os.sched_yield()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]
