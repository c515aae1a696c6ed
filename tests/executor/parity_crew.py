"""Ranks of a fleet that train as an executor does: sessions, state that moves, real stages.

A plan is one generation. Its session joins it from the layout of the one before, trains up to a
step and leaves; what the rank holds stays in its memory for the next plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray
from parity_bounds import batches_of
from run_work import Site

from resihp.config import JobConfig
from resihp.executor.inject import Injector
from resihp.executor.models import build_model
from resihp.executor.sampler import GlobalBatches
from resihp.executor.session import Session
from resihp.executor.state import TrainState
from resihp.executor.stream import Event
from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.ir.printer import print_plan
from resihp.ir.program_bytes import encode_program
from resihp.wire.messages import Commit, Deploy, Fault, Joined, Message, StepDone, StepRecord

_NOBODY = -1
"""Hosts no store: the fleet has one."""


class TrainTo(NamedTuple):
    """What a plan is to do."""

    job: JobConfig
    num_steps: int
    """Steps that are done when the plan has ended."""
    previous: Plan | None
    base: int
    """Generation of the plan before."""
    commit: Commit
    """Where it ended."""


class Stand(NamedTuple):
    """What one rank came to."""

    generation: int
    records: list[StepRecord]
    hashes: dict[str, str]
    """Of what it held when it joined, by layer and chunk."""
    parameters: dict[str, NDArray[Any]]
    """Its shards; nothing where it stands by."""
    tp: int
    tp_index: int


async def train(site: Site) -> Stand:
    """Join a generation and train to its last step; `leave` ends it."""
    order: TrainTo = site.argument
    memory = site.memory
    if order.previous is None or site.rank in site.plan.returned:
        memory.clear()
    state: TrainState = memory.setdefault("state", TrainState(order.job))
    messages: list[Message] = []
    session = session_of(site, order, state, messages.append)
    session.joining.opened(site.store)
    session.joining.went()
    with contextlib.redirect_stdout(None):  # its log
        await session.run()
    memory["session"] = session
    return _stand(site.generation, state, messages)


async def leave(site: Site) -> None:
    """End the generation; all ranks have trained to its end, as for a coordinator that closes it.

    A rank that left earlier would tear down groups that others still vote in.
    """
    await site.memory.pop("session").leave()


def session_of(
    site: Site,
    order: TrainTo,
    state: TrainState,
    send: Callable[[Message], None],
    batches: GlobalBatches | None = None,
) -> Session:
    """The session of one rank for a plan; `batches` are those of the grid, if not given."""
    deploy = Deploy(
        generation=site.generation,
        plan=print_plan(site.plan),
        previous_plan=None if order.previous is None else print_plan(order.previous),
        base=order.base,
        commit=order.commit,
        peers=dict(site.peers),
        key=site.key,
        store_rank=_NOBODY,
        program=_program_of(site),
    )
    section = msgspec.structs.replace(order.job.job, steps=order.num_steps)
    return Session(
        msgspec.structs.replace(order.job, job=section),
        site.rank,
        deploy,
        model=build_model(order.job.model),
        state=state,
        device=site.device,
        batches=batches or batches_of(order.job.parallel.dp),
        injector=Injector((), site.rank, _no_fault, world=1),
        send=send,
    )


def _program_of(site: Site) -> bytes:
    is_active = site.rank in site.plan.active_ranks
    return encode_program(expand(site.plan, site.rank)) if is_active else b""


def _no_fault(fault: Fault, sent: Event) -> None:
    raise AssertionError("nothing is injected here")


def _stand(generation: int, state: TrainState, messages: list[Message]) -> Stand:
    (joined,) = (message for message in messages if isinstance(message, Joined))
    records = [message.record for message in messages if isinstance(message, StepDone)]
    holding = state.current
    if holding is None:
        return Stand(generation, records, joined.hashes, {}, 1, 0)
    parameters = {name: tensor.numpy().copy() for name, tensor in holding.parameters.items()}
    tp, tp_index = holding.program.tp, holding.program.tp_index
    return Stand(generation, records, joined.hashes, parameters, tp, tp_index)
