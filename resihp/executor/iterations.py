"""The iterations of one generation on one rank, and what the coordinator is told of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
    send: Callable[[Message], None],
) -> None:
    """Run until `state` is at version `num_steps`. Raises as `Interpreter.run` does."""
    while state.version < num_steps:
        record = await interpreter.run(state.version)
        send(StepDone(generation=generation, record=record))
        seen = interpreter.observation
        send(
            Observed(
                generation=generation,
                step=seen.step,
                starts_ns=seen.starts_ns.tobytes(),
                ends_ns=seen.ends_ns.tobytes(),
            )
        )
    send(Finished(generation=generation))
