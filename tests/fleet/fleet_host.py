"""One process of a fleet: it hosts some ranks and obeys what comes over its pipe."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import torch
from run_work import Crew, Site

from resihp.executor.device.cpu import CpuDevice
from resihp.executor.device.interface import Device
from resihp.executor.heap import settle_memory
from resihp.executor.interpreter.run import Interpreter
from resihp.ir.model import Plan
from resihp.wire.address import Address
from resihp.wire.loop import new_event_loop

_JOB = "fleet"
_CONNECT_S = 60.0
_LOOK_S = 0.02
"""How often a process looks whether its ranks have moved."""


class Resources(NamedTuple):
    """What one process holds."""

    num_tensors: int
    """Tensors that Python's collector knows."""
    tensor_bytes: int
    num_threads: int
    num_descriptors: int
    resident_bytes: int


class Order(NamedTuple):
    """What a process is told to run."""

    crew: Crew
    plan: Plan
    ranks: tuple[int, ...]
    """Those that it hosts."""
    generation: int
    store: Address
    key: bytes
    peers: dict[int, Address]
    argument: Any


class Failure(NamedTuple):
    """Why an order was not carried out."""

    what: str


class Host:
    """The ranks of one process; every method answers one order."""

    def __init__(self, moves: Any) -> None:
        self._moves = moves
        self._devices: dict[int, Device] = {}
        self._memory: dict[int, dict[str, Any]] = {}
        self._watched: dict[int, tuple[Interpreter, object]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self, ranks: Sequence[int]) -> dict[int, Address]:
        """Devices for ranks that have none; where their wires listen."""
        addresses: dict[int, Address] = {}
        for rank in ranks:
            assert rank not in self._devices, f"rank {rank} is open already"
            self._devices[rank] = CpuDevice(_JOB, rank, timeout_s=_CONNECT_S)
            self._memory[rank] = {}
            addresses[rank] = await self._devices[rank].open()
        return addresses

    async def run(self, order: Order) -> dict[int, Any]:
        """The results of the ranks here."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    rank: tasks.create_task(self._run_rank(order, rank)) for rank in order.ranks
                }
        finally:
            if self._looking is not None:
                self._looking.cancel()
                self._looking = None
            self._watched.clear()
        return {rank: task.result() for rank, task in running.items()}

    async def _run_rank(self, order: Order, rank: int) -> Any:
        site = Site(
            plan=order.plan,
            rank=rank,
            generation=order.generation,
            device=self._devices[rank],
            store=order.store,
            key=order.key,
            peers=order.peers,
            memory=self._memory[rank],
            argument=order.argument,
            watch=partial(self._watch, rank),
        )
        try:
            return await order.crew(site)
        except Exception as error:
            error.add_note(f"rank {rank}")
            raise

    def _watch(self, rank: int, interpreter: Interpreter) -> None:
        self._watched[rank] = (interpreter, None)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Count how often each rank was seen somewhere else than before."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for rank, (interpreter, seen) in self._watched.items():
                now = interpreter.where()
                if now != seen:
                    self._moves[rank] += 1
                    self._watched[rank] = (interpreter, now)

    async def forget(self) -> None:
        """Drop the memory of all ranks."""
        for memory in self._memory.values():
            memory.clear()

    async def resources(self) -> Resources:
        """What this process holds now."""
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        with open("/proc/self/statm", encoding="ascii") as file:
            num_pages = int(file.read().split()[1])
        return Resources(
            num_tensors=len(tensors),
            tensor_bytes=sum(each.untyped_storage().nbytes() for each in tensors),
            num_threads=len(os.listdir("/proc/self/task")),
            num_descriptors=len(os.listdir("/proc/self/fd")),
            resident_bytes=num_pages * os.sysconf("SC_PAGESIZE"),
        )


def serve(pipe: Connection, moves: Any, quiet: bool) -> None:
    """The process of some ranks: obey until the pipe closes."""
    torch.set_num_threads(1)
    settle_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    host = Host(moves)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                os._exit(0)  # a normal exit would wait for a group that is stuck
            try:
                pipe.send(runner.run(getattr(host, name)(*arguments)))
            except Exception as error:
                pipe.send(Failure(_spelled(error)))


def _spelled(error: BaseException) -> str:
    """The first cause, with its rank, and where it came from."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{notes}: {type(error).__name__}: {error}\n{where}"
