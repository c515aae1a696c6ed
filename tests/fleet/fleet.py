"""All ranks of a plan on this machine, without supervisors and coordinator: for tests, benchmarks.

A fleet is a few processes, forked from one that has imported torch, so that each costs
milliseconds. A process hosts some ranks of a plan (`fleet_host`): every rank has its own device,
wire, gloo groups and interpreter, as in a job. Processes stay for the next plan, and so does what
is in the `memory` of a rank. After an error or a hang they are killed and forked anew: a broken
gloo group cannot be mended.

What the ranks do is up to a **crew**: a function that is called for each of them, in its process.
`run_work` is the usual one inside it, for any `Work`.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from fleet_host import Failure, Order, Resources, serve
from run_work import COLLECTIVE_S, Crew

from resihp.executor.groups import open_store
from resihp.ir.model import Plan
from resihp.wire.address import Address

_MAX_RANKS = 1 << 12
_WARM = ("resihp.executor.session", "resihp.executor.interpreter.run")
"""What the process from which all others are forked imports once: torch above all."""


def _forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_WARM])
    return context


class FleetError(Exception):
    """A rank failed, or its process died; the message says which and how."""


class HangError(Exception):
    """No rank moved for a while."""


class Fleet:
    """Processes that run plans, one plan after the other. Close it, or use it in a `with`.

    Ranks are dealt out to `num_processes` in runs of equal length the first time they are seen.
    With `quiet` the processes write no errors to the terminal: for plans that are meant to fail.
    Processes that are not `forked` take seconds to start, and share no memory, like those of a job.
    """

    def __init__(self, num_processes: int = 1, *, quiet: bool = False, forked: bool = True) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of groups that torch makes itself
        self._num_processes = num_processes
        self._quiet = quiet
        self._context = _forking() if forked else multiprocessing.get_context("spawn")
        self._store, self._address = open_store(COLLECTIVE_S)
        self._generation = 0
        self._moves: Any = self._context.RawArray("q", _MAX_RANKS)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._places: dict[int, int] = {}
        self._addresses: dict[int, Address] = {}
        self.num_teams = 0
        """How often processes were started."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(
        self,
        plan: Plan,
        crew: Crew,
        argument: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        quiet_s: float | None = None,
        num_ranks: int | None = None,
    ) -> dict[int, Any]:
        """What `crew` made of each rank of `plan` (`ranks`: of others than the active ones).

        `num_ranks` says how many there will be at most, so that later plans find theirs in the same
        processes. Raises FleetError where a rank fails, HangError where none moves for `quiet_s`.
        """
        wanted = plan.active_ranks if ranks is None else tuple(ranks)
        if not self._processes:
            self._start()
        self._open(wanted, num_ranks or plan.mesh.world)
        self._generation += 1
        key = secrets.token_bytes(32)
        orders: dict[int, tuple[int, ...]] = {}
        for rank in wanted:
            orders[self._places[rank]] = (*orders.get(self._places[rank], ()), rank)
        peers = {rank: self._addresses[rank] for rank in wanted}
        for place, held in orders.items():
            self._pipes[place].send(
                (
                    "run",
                    (
                        Order(
                            crew, plan, held, self._generation, self._address, key, peers, argument
                        ),
                    ),
                )
            )
        try:
            replies = self._gather(orders, quiet_s)
        except BaseException:
            self.end()
            raise
        return {rank: reply for each in replies.values() for rank, reply in each.items()}

    def resources(self) -> list[Resources]:
        """What each process holds between plans."""
        return self._ask_all("resources")

    def forget(self) -> None:
        """Drop what ranks remember of earlier plans."""
        if self._processes:
            self._ask_all("forget")

    def end(self) -> None:
        """Kill all processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes, self._places, self._addresses = [], [], {}, {}

    def _start(self) -> None:
        self.num_teams += 1
        for _ in range(self._num_processes):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(theirs, self._moves, self._quiet), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _open(self, ranks: Sequence[int], num_ranks: int) -> None:
        """Devices for ranks that have none yet."""
        new: dict[int, list[int]] = {}
        for rank in ranks:
            if rank not in self._places:
                place = min(rank * self._num_processes // num_ranks, self._num_processes - 1)
                self._places[rank] = place
                new.setdefault(place, []).append(rank)
        for place, held in new.items():
            self._pipes[place].send(("open", (held,)))
        for addresses in self._gather(new, None).values():
            self._addresses |= addresses

    def _ask_all(self, what: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((what, ()))
        replies = self._gather(range(len(self._pipes)), None)
        return [replies[place] for place in range(len(self._pipes))]

    def _gather(self, places: Iterable[int], quiet_s: float | None) -> dict[int, Any]:
        """The answers of processes, as they come."""
        running = {self._pipes[place]: place for place in places}
        replies: dict[int, Any] = {}
        seen, since_s = list(self._moves), time.monotonic()
        while running:
            for pipe in wait(list(running), timeout=None if quiet_s is None else quiet_s / 10):
                assert isinstance(pipe, Connection)
                place = running.pop(pipe)
                try:
                    reply = pipe.recv()
                except EOFError:
                    raise FleetError(f"process {place} died") from None
                if isinstance(reply, Failure):
                    raise FleetError(reply.what)
                replies[place] = reply
            now = list(self._moves)
            if quiet_s is None or now != seen:
                seen, since_s = now, time.monotonic()
            elif running and time.monotonic() - since_s > quiet_s:
                raise HangError(f"processes {sorted(running.values())} do not end")
        return replies
