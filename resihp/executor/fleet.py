"""All ranks of a plan on this machine, without supervisors and coordinator: for tests, benchmarks.

A fleet is a few processes, forked from one that has imported torch, so that each costs
milliseconds. A process hosts some ranks of a plan: every rank has its own device, wire, gloo groups
and interpreter, as in a job. Processes stay for the next plan, and so does what is in the `memory`
of a rank. After an error or a hang they are killed and forked anew: a broken gloo group cannot be
mended.

What the ranks do is up to a **crew**: a function that is called for each of them, in its process.
`run_work` is the usual one inside it, for any `Work`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import secrets
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from resihp.executor.device.cpu import CpuDevice
from resihp.executor.groups import open_store
from resihp.executor.heap import settle_memory
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.session import in_thread
from resihp.ir.model import Plan

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from resihp.executor.device.interface import Device, Groups, Wire
    from resihp.executor.interpreter.observe import Observation
    from resihp.executor.work import Work
    from resihp.ir.program import Program
    from resihp.wire.messages import StepRecord

__all__ = [
    "Crew",
    "Fleet",
    "FleetError",
    "HangError",
    "Resources",
    "Site",
    "WorkRun",
    "generation",
    "run_work",
]

_JOB = "fleet"
_CONNECT_S = 60.0
_COLLECTIVE_S = 600.0
_LOOK_S = 0.02
"""How often a process looks whether its ranks have moved."""
_MAX_RANKS = 1 << 12


class Site(NamedTuple):
    """One rank of one plan, where it runs."""

    plan: Plan
    rank: int
    generation: int
    device: Device
    store_port: int
    key: bytes
    peers: Mapping[int, int]
    """Ports of the wires of all ranks that were opened."""
    memory: dict[str, Any]
    """Whatever the crew leaves here the same rank finds under the next plan."""
    argument: Any
    """What `Fleet.run` was given for the crew."""
    watch: Callable[[Interpreter], None]
    """Tell the fleet whose progress counts; without one a rank never looks stuck."""


Crew = Callable[[Site], Awaitable[Any]]
"""Runs one rank of a plan; its result is pickled. A function of a module that can be imported."""


class FleetError(Exception):
    """A rank failed, or its process died; the message says which and how."""


class HangError(Exception):
    """No rank moved for a while."""


class Resources(NamedTuple):
    """What one process holds."""

    num_tensors: int
    """Tensors that Python's collector knows."""
    tensor_bytes: int
    num_threads: int
    num_descriptors: int
    resident_bytes: int


class WorkRun(NamedTuple):
    """What `run_work` leaves."""

    records: list[StepRecord]
    observed: list[Observation]
    """Times of each iteration, where they were asked for."""
    wall_s: list[float]
    """Of each iteration."""


@contextlib.asynccontextmanager
async def generation(site: Site) -> AsyncGenerator[Groups]:
    """The device in the generation of `site`, and what builds its groups (in a thread)."""
    site.device.begin(site.generation, site.key, site.peers)
    groups = await in_thread(
        lambda: site.device.groups(
            site.store_port,
            site.generation,
            site.rank,
            connect_s=_CONNECT_S,
            collective_s=_COLLECTIVE_S,
        )
    )
    yield groups
    # After an error nothing is let go: somebody may be stuck in a group, and the process ends.
    site.device.end()
    await in_thread(groups.release)


async def run_work(
    site: Site,
    program: Program,
    work: Work,
    num_steps: int,
    *,
    first_step: int = 0,
    wire: Callable[[Wire], Wire] | None = None,
) -> WorkRun:
    """Connect, run the program for some iterations, and leave nothing behind on the device.

    `wire` may put something before the device's own. Raises what broke an iteration.
    """
    device = site.device
    await device.connect(program.send_targets)
    interpreter = Interpreter(
        program,
        work,
        compute=device.compute,
        comm=device.comm,
        wire=device.wire if wire is None else wire(device.wire),
    )
    site.watch(interpreter)
    done = WorkRun([], [], [])
    for step in range(first_step, first_step + num_steps):
        begin_s = time.perf_counter()
        done.records.append(await interpreter.run(step))
        done.wall_s.append(time.perf_counter() - begin_s)
    interpreter.discard()
    return done


# --- one process


class _Order(NamedTuple):
    """What a process is told to run."""

    crew: Crew
    plan: Plan
    ranks: tuple[int, ...]
    """Those that it hosts."""
    generation: int
    store_port: int
    key: bytes
    peers: dict[int, int]
    argument: Any


class _Failure(NamedTuple):
    """Why an order was not carried out."""

    what: str


class _Host:
    """The ranks of one process; every method answers one order."""

    def __init__(self, moves: Any) -> None:
        self._moves = moves
        self._devices: dict[int, Device] = {}
        self._memory: dict[int, dict[str, Any]] = {}
        self._watched: dict[int, tuple[Interpreter, object]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self, ranks: Sequence[int]) -> dict[int, int]:
        """Devices for ranks that have none; the ports of their wires."""
        ports: dict[int, int] = {}
        for rank in ranks:
            assert rank not in self._devices, f"rank {rank} is open already"
            self._devices[rank] = CpuDevice(_JOB, rank, timeout_s=_CONNECT_S)
            self._memory[rank] = {}
            ports[rank] = await self._devices[rank].open()
        return ports

    async def run(self, order: _Order) -> dict[int, Any]:
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

    async def _run_rank(self, order: _Order, rank: int) -> Any:
        site = Site(
            plan=order.plan,
            rank=rank,
            generation=order.generation,
            device=self._devices[rank],
            store_port=order.store_port,
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


def _serve(pipe: Connection, moves: Any, quiet: bool) -> None:
    """The process of some ranks: obey until the pipe closes."""
    torch.set_num_threads(1)
    settle_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    host = _Host(moves)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                os._exit(0)  # a normal exit would wait for a group that is stuck
            try:
                pipe.send(runner.run(getattr(host, name)(*arguments)))
            except Exception as error:
                pipe.send(_Failure(_spelled(error)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """That of an executor: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _spelled(error: BaseException) -> str:
    """The first cause, with its rank, and where it came from."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{notes}: {type(error).__name__}: {error}\n{where}"


# --- all of them


class Fleet:
    """Processes that run plans, one plan after the other. Close it, or use it in a `with`.

    Ranks are dealt out to `num_processes` in runs of equal length the first time they are seen.
    With `quiet` the processes write no errors to the terminal: for plans that are meant to fail.
    """

    def __init__(self, num_processes: int = 1, *, quiet: bool = False) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._num_processes = num_processes
        self._quiet = quiet
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._store, self._port = open_store(_COLLECTIVE_S)
        self._generation = 0
        self._moves: Any = self._context.RawArray("q", _MAX_RANKS)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._places: dict[int, int] = {}
        self._ports: dict[int, int] = {}
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
        peers = {rank: self._ports[rank] for rank in wanted}
        for place, held in orders.items():
            self._pipes[place].send(
                (
                    "run",
                    (_Order(crew, plan, held, self._generation, self._port, key, peers, argument),),
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
        self._processes, self._pipes, self._places, self._ports = [], [], {}, {}

    def _start(self) -> None:
        self.num_teams += 1
        for _ in range(self._num_processes):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, self._moves, self._quiet), daemon=True
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
        for ports in self._gather(new, None).values():
            self._ports |= ports

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
                if isinstance(reply, _Failure):
                    raise FleetError(reply.what)
                replies[place] = reply
            now = list(self._moves)
            if quiet_s is None or now != seen:
                seen, since_s = now, time.monotonic()
            elif running and time.monotonic() - since_s > quiet_s:
                raise HangError(f"processes {sorted(running.values())} do not end")
        return replies
