"""Ranks of a fleet that are asked to end their generation while they train."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from parity_crew import TrainTo, session_of
from run_work import Site

from resihp.executor.boundary import Ask
from resihp.executor.state import TrainState
from resihp.wire.messages import Finished, StepDone


class Asked(NamedTuple):
    """Whom to ask, and when."""

    order: TrainTo
    rank: int
    after: int
    """Steps that this rank has reported by then."""


class Yielded(NamedTuple):
    """How it ended on one rank."""

    yielded: bool
    version: int
    settled: tuple[int, int]
    """Version and vote that it settles with."""
    losses: list[float]
    finished: bool


async def train_until_asked(site: Site) -> Yielded:
    """Train until the vote says to yield, or to the end."""
    asked: Asked = site.argument
    state = TrainState(asked.order.job)
    messages: list[Any] = []

    def send(message: Any) -> None:
        messages.append(message)
        done = sum(isinstance(each, StepDone) for each in messages)
        if site.rank == asked.rank and isinstance(message, StepDone) and done == asked.after:
            # Somewhere in the next iteration, as a message from outside would come.
            asyncio.get_running_loop().call_later(0.001, state.agreement.ask, Ask.YIELD)

    session = session_of(site, asked.order, state, send)
    session.joining.opened(site.store)
    session.joining.went()
    yielded = await session.run()
    site.memory["session"] = session
    return Yielded(
        yielded,
        state.version,
        (state.version, state.voted),
        [each.record.loss for each in messages if isinstance(each, StepDone)],
        any(isinstance(each, Finished) for each in messages),
    )
