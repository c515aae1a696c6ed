"""What a whole job shows to others on its machine: sockets, arguments, environments, files."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import Job, Run, complete, running, tagged, train_command

from resihp.monitor.listening import Listener, listeners_of
from resihp.monitor.rendezvous import read_place
from resihp.wire.auth import derive_key

LOOK_S = 0.1


class Watched:
    """A job that was looked at from outside while it ran and lost a rank."""

    def __init__(self) -> None:
        self.run: Run
        self.listeners: set[Listener] = set()
        self.secret = b""
        self.shown: dict[str, bytes] = {}
        """Arguments and environments of its processes."""
        self.pids: set[int] = set()
        self.private: set[str] = set()
        """Files with secrets that an executor holds open."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Watched:
    """TP 2 x DP 2, one rank lost: groups, store and transport are made twice."""
    folder = tmp_path_factory.mktemp("watched")
    job = Job(steps=12, tp=2, pp=1, dp=2, kills=((3, 5),))
    found = Watched()
    with running(train_command(job.write(folder, corpus)), folder) as run:
        found.run = run
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(run.finish)
            reading.add_done_callback(lambda _: over.set())
            while not over.wait(LOOK_S):
                _look(found, tagged(str(folder)))
            assert reading.result() == 0, run.text
    return found


def _look(found: Watched, pids: set[int]) -> None:
    found.pids |= pids
    found.listeners |= set(listeners_of(pids))
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for name in ("cmdline", "environ"):
                if content := Path(f"/proc/{pid}/{name}").read_bytes():  # a zombie has none
                    found.shown[f"{pid}/{name}"] = content
            if b"resihp.executor" in found.shown.get(f"{pid}/cmdline", b""):
                targets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
                found.private |= {each for each in targets if "secret" in each}
    with contextlib.suppress(OSError, ValueError):
        place = read_place(found.run.dir / "control")
        found.secret = place.secret if place is not None else found.secret


def test_nothing_listens_outside_the_loopback_interface(watched: Watched) -> None:
    """[S4] Coordinator, store, transport, gloo; before and after a recovery."""
    assert len({listener.pid for listener in watched.listeners}) >= 5, "nobody was seen listening"
    outside = {
        each
        for each in watched.listeners
        if not ipaddress.ip_address(each.address.host).is_loopback
    }
    assert outside == set()


def spellings(secret: bytes) -> Iterator[bytes]:
    """How a secret may be written."""
    yield secret
    yield secret.hex().encode()
    yield base64.b64encode(secret).rstrip(b"=")
    yield repr(secret)[2:-1].encode()


def secrets_of(watched: Watched) -> list[bytes]:
    keys = [derive_key(watched.secret, f"generation {number}") for number in range(4)]
    return [text for secret in (watched.secret, *keys) for text in spellings(secret)]


def test_no_secret_is_in_arguments_or_environments(watched: Watched) -> None:
    """[S7] Neither the job's nor those of generations; and no executor holds the job's open."""
    assert len(watched.secret) == 32
    assert len(watched.shown) > 10
    for where, content in watched.shown.items():
        for secret in secrets_of(watched):
            assert secret not in content, where
    assert watched.private == set()


def test_no_secret_is_in_what_a_run_leaves_behind(watched: Watched) -> None:
    """[S7] Logs, plans, traces, events, the console."""
    files = [path for path in watched.run.dir.rglob("*") if path.is_file()]
    assert len(files) > 8
    contents = {str(path): path.read_bytes() for path in files}
    contents["console"] = watched.run.text.encode()
    for where, content in contents.items():
        for secret in secrets_of(watched):
            assert secret not in content, where


def test_executors_know_nothing_of_how_their_supervisor_was_started(watched: Watched) -> None:
    """[S7] What is handed down by file number stays with the supervisor."""
    environments = [
        content
        for where, content in watched.shown.items()
        if where.endswith("/environ")
        and b"resihp.executor" in watched.shown.get(where.replace("environ", "cmdline"), b"")
    ]
    assert len(environments) >= 4
    assert not [each for each in environments if b"RESIHP_SECRET" in each or b"_LISTEN_FD" in each]


def test_two_jobs_of_one_user_do_not_meet(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> None:
    """[T34] Of the same name, at the same time, on one host: each trains as if it were alone."""
    job = Job(steps=6, tp=1, pp=2, dp=1)
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda folder: complete(job, folder, corpus), folders))
    assert [code for code, _ in results] == [0, 0], [run.text for _, run in results]
    first, second = (run for _, run in results)
    assert first.losses() == second.losses()
    for run in (first, second):
        assert [row["step"] for row in run.rows("ledger")] == list(range(6))
        assert run.events("connection_refused") == []
