"""What a crew needs to run one rank of a plan, and `run_work`, the usual crew for any `Work`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from resihp.executor.device.interface import Device, Groups, Wire
from resihp.executor.interpreter.observe import Observation
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.session import in_thread
from resihp.executor.work import Work
from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.wire.address import Address
from resihp.wire.messages import StepRecord

_CONNECT_S = 60.0
COLLECTIVE_S = 600.0
"""The end of every wait for a group."""


class Site(NamedTuple):
    """One rank of one plan, where it runs."""

    plan: Plan
    rank: int
    generation: int
    device: Device
    store: Address
    key: bytes
    peers: Mapping[int, Address]
    """Ports of the wires of all ranks that were opened."""
    memory: dict[str, Any]
    """Whatever the crew leaves here the same rank finds under the next plan."""
    argument: Any
    """What `Fleet.run` was given for the crew."""
    watch: Callable[[Interpreter], None]
    """Tell the fleet whose progress counts; without one a rank never looks stuck."""


Crew = Callable[[Site], Awaitable[Any]]
"""Runs one rank of a plan; its result is pickled. A function of a module that can be imported."""


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
            site.store,
            site.generation,
            site.rank,
            connect_s=_CONNECT_S,
            collective_s=COLLECTIVE_S,
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
