"""Strangers at every socket of a whole job, while it trains."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from jobs import Job, Run, running, tagged, train_command

from resihp.monitor.listening import listeners_of

PER_SOCKET = 20
WORDS = (b"", b"\x00\x00", b"\x00\x00\x00\x40half", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64)


def visit(folder: Path, visited: set[object], strangers: list[socket.socket]) -> None:
    """Some strangers to each socket that was not visited yet: they say something, and stay."""
    for listener in listeners_of(tagged(str(folder))):
        if listener.address in visited:
            continue
        visited.add(listener.address)
        for number in range(PER_SOCKET):
            with contextlib.suppress(OSError):  # closed meanwhile
                place = (listener.address.host, listener.address.port)
                strangers.append(socket.create_connection(place, timeout=1.0))
                strangers[-1].sendall(WORDS[number % len(WORDS)])


def test_strangers_at_every_socket_cost_nothing(tmp_path: Path, corpus: Path) -> None:
    """[S3] Monitor, executors, store, gloo: no rank is lost, and every step is done once."""
    job = Job(steps=15, tp=1, pp=2, dp=2)
    visited: set[object] = set()
    strangers: list[socket.socket] = []

    def look(line: str) -> bool:
        if line.startswith(("step", "run directory")):
            visit(tmp_path, visited, strangers)
        return False

    with running(train_command(job.write(tmp_path, corpus)), tmp_path) as run:
        try:
            run.read_until(look)
            code = run.finish()
        finally:
            for stranger in strangers:
                stranger.close()
    assert code == 0, run.text
    assert len(visited) >= 1 + job.world, "the sockets of a job were not found"
    assert len(strangers) > 80
    assert steps_of(run) == list(range(15))
    assert run.events("incident") == []
    refusals = run.events("connection_refused")
    assert refusals, "nobody counted the strangers"


def steps_of(run: Run) -> list[int]:
    return [row["step"] for row in run.rows("ledger")]
