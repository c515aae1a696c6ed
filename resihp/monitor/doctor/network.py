"""Addresses, ports and the secret of a job, and where the jobs that run here listen."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from resihp.config import JobConfig
from resihp.errors import ConfigError, UserError
from resihp.monitor.doctor.clocks import check_skew, read_clocks
from resihp.monitor.doctor.finding import Finding, note, problem, well
from resihp.monitor.listening import JobProcess, Listener, job_processes, listeners_of
from resihp.monitor.private_file import job_secret
from resihp.wire.address import LOOPBACK, Address, is_loopback, listen_at

__all__ = ["check_listeners", "check_names", "check_network", "judge_listeners"]

TOPIC = "network"
LISTENING = "listening"
SLOW_NAME_S = 1.0


def _name_of(place: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):  # that there is none is as good
        socket.getnameinfo(place, 0)


def check_network(job: JobConfig | None) -> Iterator[Finding]:
    """Whether the monitors of a job could listen where it says, and its secret is kept."""
    if job is None or not job.network.nodes:
        yield from _check_loopback()
        return
    network = job.network
    assert network.port is not None
    nodes = [Address(host, network.port) for host in network.nodes]
    yield from (finding for node in nodes for finding in _check_node(node))
    yield from check_names(nodes)
    try:
        secret = job_secret(job)
    except ConfigError as error:
        yield problem(TOPIC, str(error))
        return
    yield well(TOPIC, f"secret file {network.secret_file} is private to this user")
    if not all(is_loopback(node.host) for node in nodes):
        yield note(
            TOPIC,
            "the job leaves this machine: the control plane is authenticated, tensors and "
            "collectives are not encrypted; use a trusted network (docs/security.md)",
        )
    yield from check_skew(asyncio.run(read_clocks(nodes, job.job.name, secret)))


def _check_loopback() -> Iterator[Finding]:
    try:
        listen_at(LOOPBACK).close()
    except UserError as error:
        yield problem(TOPIC, str(error))
    else:
        yield well(TOPIC, f"one machine: everything of a job listens on {LOOPBACK}")


def _check_node(node: Address) -> Iterator[Finding]:
    try:
        socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
        listen_at(node.host, node.port).close()
    except OSError as error:
        yield problem(TOPIC, f'the address "{node.host}" cannot be found: {error.strerror}')
    except UserError as error:
        if "no address of this machine" in str(error):
            yield note(TOPIC, f"{node} is of another machine")
        elif _answers(node):
            yield note(TOPIC, f"{node} is in use; does this job run already?")
        else:
            yield problem(TOPIC, str(error))
    else:
        yield well(TOPIC, f"{node} is of this machine and free")


def check_names(
    nodes: Sequence[Address], look_up: Callable[[tuple[str, int]], object] = _name_of
) -> Iterator[Finding]:
    """Whether names of addresses are found, or not found, at once.

    torch's store looks up the names of those who connect, at every recovery.
    """
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        begun_s = time.monotonic()
        asked = {node: pool.submit(look_up, (node.host, node.port)) for node in nodes}
        for node, answer in asked.items():
            answer.result()
            took_s = time.monotonic() - begun_s
            if took_s > SLOW_NAME_S:
                yield problem(
                    TOPIC,
                    f"looking up the name of {node.host} takes {took_s:.1f} s, which every "
                    "recovery would wait for; write it into /etc/hosts",
                )
                return
    yield well(TOPIC, "names of the nodes' addresses are looked up at once")


def _answers(node: Address) -> bool:
    try:
        socket.create_connection((node.host, node.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def check_listeners(job: JobConfig | None) -> Iterator[Finding]:
    """Where the jobs of this user listen now."""
    allowed = frozenset(job.network.nodes) if job is not None else frozenset[str]()
    processes = {process.pid: process for process in job_processes()}
    yield from judge_listeners(processes.values(), listeners_of(processes), allowed)


def judge_listeners(
    processes: Iterable[JobProcess], listeners: Iterable[Listener], allowed: Set[str]
) -> Iterator[Finding]:
    """Whether all listen on the loopback interface, or on addresses that are `allowed`."""
    modules = {process.pid: process.module for process in processes}
    if not modules:
        yield well(LISTENING, "no job of this user runs here")
        return
    inside: dict[str, int] = {}
    for pid, protocol, address in listeners:
        number = ipaddress.ip_address(address.host)
        who = f"process {pid} ({modules[pid]}) listens at {protocol} {address}"
        if number.is_unspecified:
            yield problem(LISTENING, f"{who}, on every interface")
        elif number.is_loopback or address.host in allowed:
            inside[address.host] = inside.get(address.host, 0) + 1
        else:
            yield note(LISTENING, f"{who}, outside of the loopback interface")
    where = ", ".join(f"{count} at {host}" for host, count in sorted(inside.items()))
    yield well(LISTENING, f"{len(modules)} processes of jobs, sockets: {where or 'none'}")
