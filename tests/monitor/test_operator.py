"""What an operator is told where the coordinator has no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_cases import SECRET, job_of

from resihp.config import resolved
from resihp.errors import UserError
from resihp.monitor.operator import ask_where, inject_fault, kill_rank
from resihp.monitor.rendezvous import Place, write_place
from resihp.monitor.run_dir import RunDir
from resihp.wire.channel import Channel
from resihp.wire.gate import Gate
from resihp.wire.messages import Refused

WHY = "no coordinator at the moment; try again"


async def refused(run: Path, ask) -> str:
    """What is said to a request that a monitor refuses, as while the coordinator is replaced."""
    gate = Gate(SECRET, lambda identity: None, timeout_s=10.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, seals = await gate.prove(reader, writer)
        channel = Channel(reader, writer, seals)
        await channel.receive()
        channel.send(Refused(text=WHY))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        write_place(RunDir.control_of(run), Place(port, SECRET, host))
        with pytest.raises(UserError) as told:
            await ask(run)
        return str(told.value)


@pytest.mark.parametrize(
    "ask",
    [
        ask_where,
        lambda run: kill_rank(run, 1),
        lambda run: inject_fault(run, 1, {"kind": "kill"}),
        lambda run: inject_fault(run, None, {"kind": "kill_coordinator"}),
    ],
)
def test_a_refusal_is_told_as_it_is(tmp_path: Path, ask):
    """Whatever was asked: it is no error of ours."""
    (tmp_path / "job.toml").write_text(resolved(job_of()))
    assert asyncio.run(refused(tmp_path, ask)) == WHY
