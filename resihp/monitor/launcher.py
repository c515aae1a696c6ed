"""`resihp train`: starts a job on this machine, as one node or as several.

Several nodes are processes of their own, each with its monitor, at 127.0.0.1, 127.0.0.2 and so
on: what they survive of each other is what machines survive of each other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from resihp.config import JobConfig, resolved
from resihp.errors import ConfigError
from resihp.monitor.endings import Endings
from resihp.monitor.local_node import LocalNode, remove_left, run_until_signal
from resihp.monitor.node.brief import Brief, brief_file
from resihp.monitor.process import Child
from resihp.monitor.run_dir import RunDir, announce_run
from resihp.wire.address import LOOPBACK, address_of, listen_at
from resihp.wire.auth import new_secret
from resihp.wire.console import complain
from resihp.wire.timing import Timing

__all__ = ["Launcher"]


class Launcher:
    """Runs one job; `run` returns its exit code."""

    def __init__(
        self,
        job: JobConfig,
        *,
        inject: bool = True,
        num_nodes: int = 1,
        leader: Sequence[str] = ("-m", "resihp.monitor.leader"),
    ) -> None:
        """`leader` is what Python runs as coordinator, `inject` whether faults are injected.

        ConfigError where the ranks do not divide into `num_nodes`.
        """
        self._job = job if inject else msgspec.structs.replace(job, inject=())
        world = job.parallel.world
        if world % num_nodes:
            nearest = " or ".join(map(str, _nearest_divisors(world, num_nodes)))
            raise ConfigError(
                f"--nodes {num_nodes}: {world} ranks do not divide into as many; "
                f"nearest valid: {nearest}"
            )
        self._num_nodes = num_nodes
        self._leader = tuple(leader)
        self._timing = Timing.from_detect_within(job.job.detect_within_s)

    async def run(self) -> int:
        """Start the job and wait for its end. No process of it is left when this returns.

        Raises ResihpError where a node's monitor cannot be kept alive.
        """
        run_dir = announce_run(self._job)
        listeners = [listen_at(_host(node)) for node in range(self._num_nodes)]
        briefs = self._briefs(listeners, run_dir)
        if len(briefs) == 1:
            with listeners[0] as listener:
                return await run_until_signal(LocalNode(briefs[0], listener, run_dir.job_path))
        return await _Nodes(briefs, listeners, run_dir, self._timing).run()

    def _briefs(self, listeners: Sequence[socket.socket], run_dir: RunDir) -> list[Brief]:
        """The first node begins the run; the others learn from it where it is."""
        addresses = tuple((place.host, place.port) for place in map(address_of, listeners))
        secret = new_secret()
        return [
            Brief(
                job=resolved(self._job),
                secret=secret,
                node=node,
                addresses=addresses,
                run_dir=str(run_dir.path) if node == 0 else None,
                leader=self._leader,
                nodes_return=False,
            )
            for node in range(self._num_nodes)
        ]


def _nearest_divisors(number: int, near: int) -> list[int]:
    """The largest divisor below `near`, and the smallest above it where there is one."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below = max(each for each in divisors if each < near)
    return [below, *(each for each in divisors if each > near)][:2]


def _host(node: int) -> str:
    network, _, last = LOOPBACK.rpartition(".")
    return f"{network}.{int(last) + node}"


class _Nodes:
    """Several nodes on this machine, each a process."""

    def __init__(
        self,
        briefs: Sequence[Brief],
        listeners: Sequence[socket.socket],
        run_dir: RunDir,
        timing: Timing,
    ) -> None:
        self._run_dir = run_dir
        self._hosts = [address_of(listener).host for listener in listeners]
        self._grace_s = timing.grace_s
        self._children: list[Child] = []
        for brief, listener in zip(briefs, listeners, strict=True):
            brief_fd = brief_file(brief)
            fds = listener.fileno(), brief_fd
            command = ["-m", "resihp.monitor.local_node", *map(str, fds), str(run_dir.job_path)]
            self._children.append(
                Child(
                    [sys.executable, *command],
                    env=os.environ,
                    pass_fds=fds,
                    own_group=True,
                    block_signals=True,
                )
            )
            os.close(brief_fd)
        for listener in listeners:
            listener.close()  # a node that dies takes its own with it

    async def run(self) -> int:
        """Until all have ended; the exit code of the first that was not killed, or 1."""
        endings = Endings(self._send, self._kill)
        codes = await asyncio.gather(*(child.wait() for child in self._children))
        if endings.first is not None:
            return endings.code(1)
        ended = [code for code in codes if code >= 0]
        if not ended:
            how = signal.Signals(-codes[0]).name
            complain(f"resihp: error: every node was killed, node 0 by {how}")
            return 1
        return ended[0]

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            child.send(number)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        remove_left(self._run_dir.path, self._hosts, self._grace_s)
