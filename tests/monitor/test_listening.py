"""What the kernel says of listening sockets, read and found again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.monitor.listening import job_processes, listeners_of, parse_table
from resihp.wire.address import LOOPBACK, Address, address_of, listen_at

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:A8A7 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1
   1: 0200007F:0050 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 112 1
   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 113 1
"""
TABLE6 = """\
  sl  local_address                         remote_address                        st ...
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0 0 0 0 0 7
"""


def test_a_table_of_the_kernel():
    """Bytes of an address are turned round, ports are not; connections are left out."""
    if sys.byteorder != "little":
        pytest.skip("the table below is of a little-endian machine")
    assert list(parse_table(TABLE, "0A")) == [
        (111, Address("127.0.0.1", 0xA8A7)),
        (113, Address("0.0.0.0", 8080)),
    ]
    assert list(parse_table(TABLE6, "0A")) == [(7, Address("::1", 8080))]


def test_own_sockets_are_found():
    """TCP and UDP, on the interface that they are bound to, and not those that are connected."""
    with (
        listen_at(LOOPBACK) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.create_connection(tcp.getsockname()),
    ):
        udp.bind(("127.0.0.2", 0))
        before = {("tcp", address_of(tcp)), ("udp", address_of(udp))}
        found = {(each.protocol, each.address) for each in listeners_of([os.getpid()])}
    assert found >= before
    assert before.isdisjoint((each.protocol, each.address) for each in listeners_of([os.getpid()]))


def test_a_process_that_is_gone_listens_nowhere():
    """It is no error: processes end at any time."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert listeners_of([process.pid]) == []


def test_processes_of_jobs_are_told_from_others(tmp_path: Path):
    """By the module that Python runs in them, not by a name somewhere in their arguments."""
    (tmp_path / "resihp").mkdir()
    code = "print(flush=True); input()"
    for name in ("__init__.py", "worker.py"):
        (tmp_path / "resihp" / name).write_text(code if name == "worker.py" else "")
    other_file = tmp_path / "other.py"
    other_file.write_text(code)

    def started(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    ours = started("-m", "resihp.worker", "job.toml")
    other = started(str(other_file), "-m", "resihp.worker")
    try:
        for process in (ours, other):
            assert process.stdout is not None
            process.stdout.readline()
        found = {process.pid: process for process in job_processes()}
        assert found[ours.pid].module == "resihp.worker"
        assert found[ours.pid].parent == os.getpid()
        assert os.getpid() not in found
        assert other.pid not in found
    finally:
        for process in (ours, other):
            process.communicate(b"\n")
