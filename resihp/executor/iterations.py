"""The iterations of one generation on one rank, and what the coordinator is told of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from resihp.executor.boundary import Boundary
from resihp.executor.interpreter.observe import Observation
from resihp.executor.interpreter.run import Interpreter
from resihp.wire.messages import Finished, Message, Observed, StepDone

__all__ = ["iterate"]


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


async def iterate(
    interpreter: Interpreter,
    state: _Versioned,
    *,
    num_steps: int,
    generation: int,
    boundary: Boundary,
    send: Callable[[Message], None],
    steady: Callable[[], Awaitable[Interpreter]] | None = None,
) -> bool:
    """Run until `state` is at version `num_steps`, or until all agree to end before.

    The interpreter that `steady` makes runs all iterations but the first. Whether they agreed so.
    Raises as `Interpreter.run` and `Boundary.cross` do.
    """
    told = -1
    ends_here = False
    while state.version < num_steps and not ends_here:
        record = await interpreter.run(state.version)
        seen = _observed(interpreter.observation, told, generation)
        told = told if seen is None else seen.step
        send(StepDone(generation=generation, record=record, observed=seen))
        ends_here = await boundary.cross(state.version)
        if steady is not None and state.version < num_steps and not ends_here:
            await _settle(interpreter, told, generation, send)
            interpreter, steady, told = await steady(), None, -1
    await _settle(interpreter, told, generation, send)
    if state.version < num_steps:
        return True
    await boundary.finish()
    send(Finished(generation=generation))
    return False


async def _settle(
    interpreter: Interpreter, told: int, generation: int, send: Callable[[Message], None]
) -> None:
    """Wait for what the interpreter still does, and tell its last times."""
    await interpreter.settle()
    seen = _observed(interpreter.observation, told, generation)
    if seen is not None:
        send(seen)


def _observed(seen: Observation, told: int, generation: int) -> Observed | None:
    """The times of an iteration, unless they are of step `told`."""
    if seen.step == told:
        return None
    return Observed(
        generation=generation,
        step=seen.step,
        starts_ns=seen.starts_ns.tobytes(),
        ends_ns=seen.ends_ns.tobytes(),
    )
