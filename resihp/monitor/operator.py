"""Requests of an operator to the coordinator of a running job."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

from resihp.config import load
from resihp.errors import UserError, WireError
from resihp.monitor.rendezvous import read_place
from resihp.monitor.run_dir import RunDir
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connect_handshake
from resihp.wire.messages import (
    AskWhere,
    Inject,
    KillRank,
    Message,
    Positions,
    Refused,
    Reply,
    What,
    Wish,
)
from resihp.wire.timing import Timing

__all__ = ["ask_all", "ask_where", "find_run", "inject_fault", "kill_rank"]

TIMEOUT_S = 10.0


def find_run(given: Path | None, runs_dir: Path) -> Path:
    """The run directory that is meant: `given`, or the newest running one under `runs_dir`.

    Raises UserError where none runs.
    """
    if given is not None:
        if not RunDir(given).control_path.exists():
            raise UserError(f"{given} is not the directory of a running job")
        return given
    controls = sorted(runs_dir.glob("*/control"), key=lambda path: path.stat().st_mtime)
    for control in reversed(controls):
        if _listens(control):
            return control.parent
    raise UserError(
        f"no job runs under {runs_dir}: name the directory of its run with RUN, or where runs are "
        "with --runs-dir"
    )


def _listens(control: Path) -> bool:
    """Whether the coordinator is there; one that was killed leaves its file behind."""
    place = read_place(control)
    if place is None:
        return False
    try:
        socket.create_connection((place.host, place.port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


async def kill_rank(run: Path, rank: int) -> str:
    """SIGKILL the executor of `rank`; what the coordinator says. UserError where it refuses."""
    reply = await _ask(run, KillRank(rank=rank))
    assert isinstance(reply, Reply)
    return reply.text


async def inject_fault(run: Path, rank: int | None, fault: Mapping[str, str | int | float]) -> str:
    """Bring a fault (keys of an `[[inject]]`) about at `rank`; what the coordinator says of it.

    `rank` may be None for one that is done to no rank. UserError where it refuses.
    """
    ends_who_answers = fault["kind"] in ("kill_monitor", "kill_coordinator")
    reply = await _ask(run, Inject(rank=rank, fault=dict(fault)), may_end=ends_who_answers)
    if reply is None:
        return f"{fault['kind']} has struck: who would have answered is gone"
    assert isinstance(reply, Reply)
    return reply.text


async def ask_where(run: Path) -> Positions:
    """Where the ranks of a running job are. UserError where nobody can tell at the moment."""
    reply = await _ask(run, AskWhere())
    assert isinstance(reply, Positions)
    return reply


async def ask_all(run: Path, what: What) -> Reply:
    """Have all ranks do `what` at their next boundary, and wait for what comes of it.

    UserError where it cannot be done, or not in time.
    """
    reply = await _ask(run, Wish(what=what))
    assert isinstance(reply, Reply)
    return reply


async def _ask(run: Path, request: Message, *, may_end: bool = False) -> Message | None:
    """The answer. UserError where it is a refusal, or nobody answers.

    `may_end`: the request may end who answers, and then there is none (None).
    """
    is_asked = False
    place = read_place(RunDir(run).control_path)
    if place is None:
        raise UserError(f"{run} is not the directory of a running job")
    job = load(run / "job.toml")
    bound_s = TIMEOUT_S
    if isinstance(request, Wish):
        bound_s += Timing.from_detect_within(job.job.detect_within_s).wish_s
    try:
        async with asyncio.timeout(bound_s):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            seals = await connect_handshake(
                reader,
                writer,
                place.secret,
                Identity(job.job.name, "operator", 0, 0),
                timeout_s=TIMEOUT_S,
            )
            channel = Channel(reader, writer, seals)
            channel.send(request)
            is_asked = True
            reply = await channel.receive()
            channel.close()
    except (OSError, WireError, TimeoutError) as error:
        if may_end and is_asked and not isinstance(error, TimeoutError):
            return None
        why = str(error) or type(error).__name__
        raise UserError(f"the coordinator of {run} does not answer: {why}") from error
    if reply is None and not may_end:
        raise UserError(f"the coordinator of {run} left without an answer")
    if isinstance(reply, Refused):
        raise UserError(reply.text)
    return reply
