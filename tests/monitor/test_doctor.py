"""`resihp doctor`: what it looks at, what it says, and what it removes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from coordinator_cases import job_of
from hypothesis import given
from hypothesis import strategies as st

from resihp.config import CheckpointConfig, DeviceConfig, JobConfig, NetworkConfig, StateConfig
from resihp.monitor.doctor import network as network_module
from resihp.monitor.doctor.clocks import (
    ClockReading,
    Offset,
    check_clock,
    check_skew,
    offset_of,
    read_clocks,
)
from resihp.monitor.doctor.finding import Finding
from resihp.monitor.doctor.leftovers import check_leftovers
from resihp.monitor.doctor.network import check_names, check_network, judge_listeners
from resihp.monitor.doctor.room import check_room, snapshot_bytes, state_bytes
from resihp.monitor.doctor.timeouts import MEANINGS, ORDER, check_order, timeouts
from resihp.monitor.listening import JobProcess, Listener
from resihp.monitor.node.operators import Operators
from resihp.monitor.rendezvous import Place, write_place
from resihp.wire.address import LOOPBACK, Address, address_of, listen_at
from resihp.wire.gate import Gate
from resihp.wire.shared_memory import SharedDir
from resihp.wire.timing import Timing

SECRET = b"s" * 32


def levels(findings: Iterator[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def problems(findings: Iterator[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level == "problem"]


# --- timeouts


@given(st.floats(0.1, 60.0))
def test_every_value_of_the_knob_gives_timeouts_in_order(detect_within_s: float):
    """Whatever a job file may say."""
    assert levels(check_order(detect_within_s)) == ["ok"]


def test_every_timeout_has_a_meaning_and_every_order_is_of_timeouts():
    """A timeout that is added must be explained to operators."""
    assert set(MEANINGS) == set(Timing.__struct_fields__)
    assert {name for shorter, longer, _ in ORDER for name in (shorter, longer)} <= set(MEANINGS)
    assert [row.name for row in timeouts(1.0)] == list(Timing.__struct_fields__)


def test_timeouts_out_of_order_are_named(monkeypatch: pytest.MonkeyPatch):
    """All of them, with their seconds and what the difference is for."""

    def shuffled(_: float) -> Timing:
        return msgspec.structs.replace(right, lease_s=99.0)

    right = Timing.from_detect_within(1.0)
    monkeypatch.setattr(Timing, "from_detect_within", shuffled)
    assert problems(check_order(1.0)) == [
        "lease_s = 99 s must be below decide_s = 20 s: nodes are asked more than once to write a "
        "plan down",
        "lease_s = 99 s must be below fence_s = 20 s: a new coordinator comes before executors "
        "are killed",
        "lease_s = 99 s must be below orphan_s = 30 s: a monitor is restarted before a supervisor "
        "gives up",
    ]


# --- clocks


def test_this_machine_has_a_clock():
    """And one that goes back is found."""
    assert levels(check_clock()) == ["ok"]
    assert problems(check_clock([1.0, 2.0, 1.5, 3.0])) == [
        "the monotonic clock went back by 0.5 s; no timeout holds"
    ]


def test_the_offset_of_a_clock_comes_from_the_shortest_way():
    """As if it had been equally long both ways; the error is at most half of it."""
    readings = [ClockReading(10.0, 10.4, 20.0), ClockReading(11.0, 11.1, 20.55)]
    offset = offset_of(readings)
    assert offset.seconds == pytest.approx(9.5)
    assert offset.error_s == pytest.approx(0.05)


def test_skew_is_a_problem_only_where_it_is_certain():
    """A long way there and back may look like one; who does not answer is no problem."""
    found = list(
        check_skew(
            [
                ("a", Offset(0.2, 0.01)),
                ("b", Offset(-3.0, 2.5)),
                ("c", Offset(3.0, 0.1)),
                ("d", "?"),
            ]
        )
    )
    assert [each.level for each in found] == ["ok", "ok", "problem", "note"]
    assert "node c: its wall clock is +3.000 s from ours" in found[2].text


def test_a_monitor_tells_its_clock_to_operators_of_its_job_only():
    """Another secret, or nobody there, is an answer in words."""

    async def main() -> list[tuple[str, Offset | str]]:
        gate = Gate(SECRET, lambda _: None, timeout_s=5.0)
        operators = Operators(Timing.from_detect_within(1.0))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                _, channel = await gate.enter(reader, writer)
                await operators.serve(channel, None)
            except Exception:
                assert gate.num_refused > 0
            finally:
                writer.close()

        with listen_at(LOOPBACK) as gone:
            nobody = address_of(gone)
        server = await asyncio.start_server(serve, sock=listen_at(LOOPBACK))
        async with server:
            node = address_of(server.sockets[0])
            good = await read_clocks([node, nobody], "sim", SECRET)
            return good + await read_clocks([node], "sim", b"x" * 32)

    (_, good), (_, nobody), (_, stranger) = asyncio.run(main())
    assert isinstance(good, Offset)
    assert abs(good.seconds) <= good.error_s + 0.01
    assert nobody == "no job runs there"
    assert "does not know this job's secret" in str(stranger)


# --- network


def networked(tmp_path: Path, *nodes: str, port: int = 29400) -> JobConfig:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 44)
    key.chmod(0o600)
    network = NetworkConfig(nodes=nodes, port=port, secret_file=str(key))
    return msgspec.structs.replace(job_of(), network=network)


def test_addresses_that_are_ours_taken_foreign_or_unknown(tmp_path: Path):
    """[T30] Each is told apart; only what cannot work is a problem."""
    with listen_at("127.0.0.2") as taken:
        port = address_of(taken).port
        nodes = ("127.0.0.3", "127.0.0.2", "198.51.100.7", "nowhere.invalid")
        found = list(check_network(networked(tmp_path, *nodes, port=port)))
    assert found[0].text == f"127.0.0.3:{port} is of this machine and free"
    assert found[1].text == f"127.0.0.2:{port} is in use; does this job run already?"
    assert found[2].text == f"198.51.100.7:{port} is of another machine"
    assert found[3].text.startswith('the address "nowhere.invalid" cannot be found')
    assert [each.level for each in found[:4]] == ["ok", "note", "note", "problem"]


def test_a_secret_that_others_can_read_is_a_problem(tmp_path: Path):
    """It is not used to ask anybody then."""
    job = networked(tmp_path, "127.0.0.2")
    assert problems(check_network(job)) == []
    (tmp_path / "key").chmod(0o644)
    (text,) = problems(check_network(job))
    assert "not a private file of this user; nearest valid: chmod 600" in text


def test_a_job_that_leaves_the_machine_is_told_what_is_not_protected(tmp_path: Path):
    """Of loopback addresses only, it is not."""
    told = "tensors and collectives are not encrypted"
    away, here = (networked(tmp_path, node) for node in ("198.51.100.7", "127.0.0.2"))
    assert any(told in each.text for each in check_network(away))
    assert not any(told in each.text for each in check_network(here))


def test_a_slow_look_up_of_names_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    """torch's store does one for each connection."""
    monkeypatch.setattr(network_module, "SLOW_NAME_S", 0.05)
    nodes = [Address("10.0.0.1", 1), Address("10.0.0.2", 1)]
    (text,) = problems(check_names(nodes, lambda _: threading.Event().wait(0.1)))
    assert text.startswith("looking up the name of 10.0.0.1 takes")
    assert problems(check_names(nodes, lambda _: None)) == []


def test_sockets_outside_of_the_chosen_interface_are_found():
    """[S4] Every interface is a problem; an address that the job names is none."""
    process = JobProcess(7, 1, "resihp.executor")
    hosts = ("127.0.0.1", "10.0.0.1", "10.0.0.2", "0.0.0.0", "::")
    listeners = [Listener(7, "tcp", Address(host, 80)) for host in hosts]
    found = list(judge_listeners([process], listeners, frozenset({"10.0.0.1"})))
    assert [each.level for each in found] == ["note", "problem", "problem", "ok"]
    assert "tcp 0.0.0.0:80, on every interface" in found[1].text
    assert found[3].text == "1 processes of jobs, sockets: 1 at 10.0.0.1, 1 at 127.0.0.1"


# --- leftovers


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders in the place of /dev/shm, of the rendezvous and of runs."""
    found = {name: tmp_path / name for name in ("shm", "tmp", "runs")}
    for path in found.values():
        path.mkdir()
    return found


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def look(places: dict[str, Path], *, clean: bool = False) -> list[Finding]:
    env = {"XDG_RUNTIME_DIR": str(places["tmp"])}
    return list(check_leftovers(places["runs"], clean=clean, env=env, shm=places["shm"]))


def test_what_dead_jobs_left_is_named_and_removed(places: dict[str, Path]):
    """Snapshots that nobody holds, rendezvous of dead agents, files of dead coordinators."""
    uid = os.getuid()
    stale = places["shm"] / f"resihp-{uid}-run-1"
    stale.mkdir(mode=0o700)
    (stale / "lock").touch(mode=0o600)
    (stale / "rank0-0").write_bytes(b"state")
    meeting = places["tmp"] / f"resihp-{uid}-{dead_pid()}-none-0"
    write_place(meeting, Place(1, SECRET))
    run = places["runs"] / "e2e-1"
    run.mkdir()
    with listen_at(LOOPBACK) as gone:
        port = address_of(gone).port
    write_place(run / "control", Place(port, SECRET))
    found = look(places)
    assert [each.level for each in found] == ["problem"] * 3
    for path in (stale, meeting, run / "control"):
        assert any(str(path) in each.text for each in found)
    assert [each.level for each in look(places, clean=True)] == ["note"] * 3
    assert not any(path.exists() for path in (stale, meeting, run / "control"))
    assert run.exists()
    assert [each.level for each in look(places)] == ["ok"]


def test_what_is_alive_or_of_others_stays(places: dict[str, Path]):
    """Whoever holds the lock, listens, or is the agent; other users; names that are not ours."""
    uid = os.getuid()
    held = SharedDir(places["shm"] / f"resihp-{uid}-run-1")
    kept = [held.path, places["tmp"] / f"resihp-{uid}-{os.getpid()}-none-0"]
    write_place(kept[1], Place(1, SECRET))
    run = places["runs"] / "e2e-1"
    run.mkdir()
    others = (
        f"resihp-{uid + 1}-{dead_pid()}-x-0",
        f"resihp-{uid}-notes",
        f"resihp-{uid}-1-x-0.bak",
    )
    for name in others:
        path = places["tmp"] / name
        path.touch()
        kept.append(path)
    link = places["tmp"] / f"resihp-{uid}-{dead_pid()}-link-0"
    link.symlink_to(places["tmp"] / others[1])
    kept.append(link)
    with listen_at(LOOPBACK) as there:
        kept.append(run / "control")
        write_place(kept[-1], Place(address_of(there).port, SECRET))
        assert [each.level for each in look(places, clean=True)] == ["ok"]
    held_anyway = [path for path in kept if path.exists()]
    held.leave()
    assert held_anyway == kept


# --- room


def test_room_for_snapshots_and_checkpoints(tmp_path: Path):
    """A state that no disk holds, and one that any does."""
    small = msgspec.structs.replace(job_of(), checkpoint=CheckpointConfig(every=5, keep=3))
    small = msgspec.structs.replace(
        small, job=msgspec.structs.replace(small.job, runs_dir=str(tmp_path / "later"))
    )
    assert problems(check_room(small, tmp_path)) == []
    model = msgspec.structs.replace(
        small.model, hidden_size=65536, intermediate_size=1 << 20, num_hidden_layers=1000
    )
    huge = msgspec.structs.replace(small, model=model)
    shm, disk = problems(check_room(huge, tmp_path))
    assert "snapshots need" in shm
    assert "checkpoints (4 at a time) need" in disk
    (gone,) = problems(check_room(small, tmp_path / "nothing"))
    assert "is not there; snapshots go there: set [state] snapshot_every = 0" in gone


def test_a_run_that_cannot_have_its_directory_is_said_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever is saved: on a full disk, or where nobody may write (root may everywhere)."""
    job = msgspec.structs.replace(job_of(), state=StateConfig(snapshot_every=0))
    job = msgspec.structs.replace(
        job, job=msgspec.structs.replace(job.job, runs_dir=str(tmp_path / "later"))
    )
    full = shutil.disk_usage(tmp_path)._replace(free=4096)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        assert (
            f"{tmp_path}: 0.0 MiB free: the run cannot start there" in problems(check_room(job))[0]
        )
    (tmp_path / "later").write_text("a file is in its way")
    found = problems(check_room(job))
    assert f"{tmp_path / 'later'} is not writable: the run cannot start there" in found[0]


def test_how_much_state_a_node_keeps():
    """Twice for each replica, twice that with a buddy; divided by the nodes; none if emulated."""
    one = job_of(tp=2, pp=1, dp=2)
    assert snapshot_bytes(one) == 2 * 2 * state_bytes(one)
    pair = msgspec.structs.replace(one, network=NetworkConfig(nodes=("a", "b")))
    assert snapshot_bytes(pair) == 2 * 2 * state_bytes(one)
    alone = msgspec.structs.replace(pair, state=StateConfig(buddy=False))
    assert snapshot_bytes(alone) == 2 * state_bytes(one)
    for job in (
        msgspec.structs.replace(one, state=StateConfig(snapshot_every=0)),
        msgspec.structs.replace(one, device=DeviceConfig(kind="emulated")),
    ):
        assert snapshot_bytes(job) == 0


# --- the verb


def doctor(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "resihp", "doctor", *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        check=False,
    )


def test_the_verb_tells_people_and_programs(tmp_path: Path):
    """The same findings; exit status 1 with a problem, which comes last."""
    told = doctor("--format", "json", folder=tmp_path)
    document = json.loads(told.stdout)
    assert (told.returncode == 0) == document["ok"]
    assert [row["name"] for row in document["timeouts"]] == list(Timing.__struct_fields__)
    stale = tmp_path / f"resihp-{os.getuid()}-{dead_pid()}-x-0"
    write_place(stale, Place(1, SECRET))
    told = doctor(folder=tmp_path)
    assert told.returncode == 1
    assert f"problem  leftovers  {stale} was left by a killed job" in told.stdout
    assert told.stderr == ""
    assert f"removed {stale}" in doctor("--clean", folder=tmp_path).stdout
    assert not stale.exists()


def test_a_job_file_that_cannot_be_read_is_wrong_use(tmp_path: Path):
    """Exit status 2, without a traceback."""
    told = doctor("nowhere.toml", folder=tmp_path)
    assert told.returncode == 2
    assert told.stderr.startswith("resihp: error: nowhere.toml: cannot be read")
