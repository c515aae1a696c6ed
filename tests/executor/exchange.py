"""The groups of all ranks of a plan as threads of this process, checked where gloo would trust."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.memberships import memberships
from resihp.executor.model import Model
from resihp.ir.model import Plan

FAR_S = 30.0
T = TypeVar("T")


class Exchange:
    """One group of threads that exchange tensors as the members of a real group do."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._barrier = threading.Barrier(len(ranks), timeout=FAR_S)
        self._slots: list[Any] = [None] * len(ranks)

    def swap(self, index: int, mine: object) -> list[Any]:
        """What every member put in, in member order."""
        self._slots[index] = mine
        self._barrier.wait()
        all_of_them = list(self._slots)
        self._barrier.wait()
        return all_of_them

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator:
    """`Communicator` between threads."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange = exchange
        self.ranks = exchange.ranks
        self.index = index
        self.degree = len(exchange.ranks)

    def all_reduce_(self, tensor: Tensor) -> None:
        """In an order that depends on the place in the tensor, as a ring's does."""
        parts = self._exchange.swap(self.index, tensor.clone())
        assert len({part.shape for part in parts}) == 1
        length = -(-tensor.numel() // self.degree)
        flat = tensor.view(-1)
        for turn in range(self.degree):
            order = [parts[(turn + at) % self.degree].view(-1) for at in range(self.degree)]
            run = slice(turn * length, (turn + 1) * length)
            flat[run] = sum(part[run] for part in order[1:]) + order[0][run]

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange.swap(self.index, part.clone()))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        table = self._exchange.swap(self.index, [part.clone() for part in parts])
        received = [row[self.index] for row in table]
        assert [part.numel() for part in received] == list(sizes)
        return received


def run_ranks(
    model: Model, plan: Plan, work: Callable[[int, dict[str, Communicator]], T]
) -> dict[int, T]:
    """`work(rank, groups by role)` of every active rank, each on a thread; the first error."""
    exchanges: dict[str, Exchange] = {}
    mine: dict[int, dict[str, Communicator]] = {}
    for rank in plan.active_ranks:
        mine[rank] = {}
        for role, name, ranks in memberships(model, plan, rank):
            exchange = exchanges.setdefault(name, Exchange(ranks))
            assert exchange.ranks == ranks, f"{name} is not the same on all members"
            mine[rank][role] = ThreadCommunicator(exchange, ranks.index(rank))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, mine[rank])
        except BaseException as error:
            errors.append(error)
            for exchange in exchanges.values():
                exchange.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR_S)
    if errors:
        raise errors[0]
    return results
