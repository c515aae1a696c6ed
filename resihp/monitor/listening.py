"""Which processes listen where, as the kernel has it (Linux)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from resihp.monitor.process import stat_of
from resihp.wire.address import Address

__all__ = ["JobProcess", "Listener", "job_processes", "listeners_of", "parse_table"]

_LISTEN, _UNCONNECTED = "0A", "07"
_TABLES = (("tcp", _LISTEN), ("tcp6", _LISTEN), ("udp", _UNCONNECTED), ("udp6", _UNCONNECTED))
_OURS = ("resihp", "resihp.worker", "resihp.executor", "resihp.monitor")


class Listener(NamedTuple):
    """A socket that waits for others."""

    pid: int
    protocol: str
    address: Address


class JobProcess(NamedTuple):
    """A process of a job of this user."""

    pid: int
    parent: int
    module: str
    """What Python runs in it."""


def listeners_of(pids: Iterable[int]) -> list[Listener]:
    """Where processes listen; those that ended meanwhile, or are not ours, listen nowhere."""
    found: list[Listener] = []
    tables: dict[str, dict[int, tuple[str, Address]]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes = set(_socket_inodes(pid))
            space = os.readlink(f"/proc/{pid}/ns/net")
            if space not in tables:
                tables[space] = dict(_table_of(pid))
            table = tables[space]
            found += [Listener(pid, *table[inode]) for inode in sorted(inodes & table.keys())]
    return found


def _socket_inodes(pid: int) -> Iterator[int]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                yield int(target[len("socket:[") : -1])


def _table_of(pid: int) -> Iterator[tuple[int, tuple[str, Address]]]:
    """(inode, (protocol, address)) of all that waits in the network namespace of `pid`."""
    for protocol, state in _TABLES:
        path = Path(f"/proc/{pid}/net/{protocol}")
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for inode, address in parse_table(path.read_text(encoding="ascii"), state):
                yield inode, (protocol.removesuffix("6"), address)


def parse_table(text: str, state: str) -> Iterator[tuple[int, Address]]:
    """(inode, local address) of the sockets in `state` of a table like /proc/net/tcp."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if fields[3] == state:
            host, _, port = fields[1].partition(":")
            yield int(fields[9]), Address(_host(host), int(port, 16))


def _host(digits: str) -> str:
    """The kernel prints addresses as 32-bit words of this machine's byte order."""
    words = bytes.fromhex(digits)
    number = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    family = socket.AF_INET if len(number) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, number)


def job_processes() -> list[JobProcess]:
    """All processes of this user that run a job or a part of one."""
    found: list[JobProcess] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid():
                    found += _job_process(folder)
    return sorted(found)


def _job_process(folder: Path) -> Iterator[JobProcess]:
    arguments = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    module = _module(arguments)
    if module is None or int(folder.name) == os.getpid():
        return
    if module == "resihp" and "train" not in arguments:
        return
    pid = int(folder.name)
    yield JobProcess(pid, stat_of(pid).parent, module)


def _module(arguments: list[str]) -> str | None:
    """The module of ours that a Python process runs, None where it runs something else."""
    if "python" not in Path(arguments[0]).name:
        return None
    rest = arguments[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m":
        name = rest[1]
        return name if name in _OURS or name.startswith("resihp.monitor.") else None
    # The script that an installed package has.
    return "resihp" if rest and Path(rest[0]).name == "resihp" else None
