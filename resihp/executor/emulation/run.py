"""A plan run on emulated devices, in virtual or in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import uvloop

from resihp.errors import Deadlock
from resihp.executor.emulation.stuck import explain
from resihp.executor.emulation.virtual import run_virtually
from resihp.executor.emulation.world import Iteration, World
from resihp.ir.model import GroupName, Plan

__all__ = ["emulate"]


def emulate(
    plan: Plan,
    seconds: Mapping[GroupName, Sequence[float]],
    *,
    num_iterations: int = 1,
    in_real_time: bool = False,
) -> list[Iteration]:
    """Iterations of `plan`, all its ranks in this process.

    `seconds` are those of every instruction of each group's stream, of a send until its tensor may
    be used. Virtual time takes any plan that can be expanded, and raises Deadlock, in terms of the
    plan, where it gets stuck. In real time a plan must be verified: a stuck one would hang.
    """
    worlds: list[World] = []

    async def run() -> list[Iteration]:
        world = World(plan, seconds)
        worlds.append(world)
        try:
            return [await world.iterate(step) for step in range(num_iterations)]
        finally:
            world.close()

    if in_real_time:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    try:
        return run_virtually(run())
    except Deadlock:
        raise Deadlock(explain(worlds[0].ranks)) from None
