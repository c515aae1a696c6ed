"""One node of `resihp train`: its monitor and a supervisor per rank, all kept alive.

With several nodes on one machine, each is a process of its own, and its death is that of a node:
`python -m resihp.monitor.local_node LISTENER BRIEF JOB`, by the launcher only. The first two
are inherited descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from resihp.errors import ResihpError
from resihp.monitor.endings import Endings
from resihp.monitor.keeper import Keeper
from resihp.monitor.node.brief import Brief, read_brief
from resihp.monitor.node.owner import NodeOwner
from resihp.monitor.process import Child
from resihp.monitor.rendezvous import HOST, PORT, RESTARTED, SECRET_FD, secret_file
from resihp.monitor.run_dir import RunDir
from resihp.wire.address import address_of
from resihp.wire.console import complain
from resihp.wire.loop import run
from resihp.wire.shared_memory import remove_once_unheld, shared_path
from resihp.wire.timing import Timing

__all__ = ["LocalNode", "remove_left", "run_until_signal"]


class LocalNode:
    """`run` serves one node until the job is over; its exit code."""

    def __init__(self, brief: Brief, listener: socket.socket, job_path: Path) -> None:
        job = brief.job_config()
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._world = job.parallel.world
        self._ranks = brief.ranks(brief.node, self._world)
        self._worker = ("-m", "resihp.worker", str(job_path))
        self._place = address_of(listener)
        self._secret_fd = secret_file(brief.secret)
        self._owner = NodeOwner(brief, listener, self._timing)
        self._supervisors = [self._keeper(rank) for rank in self._ranks]

    @property
    def grace_s(self) -> float:
        """How long the end of a job may take once it was asked for."""
        return self._timing.end_bound_s

    async def run(self) -> int:
        """No process of the node is left when this returns.

        ResihpError where its monitor cannot be kept alive.
        """
        keeping = [
            asyncio.create_task(keeper.run(lambda: self._owner.is_over, max_quick_ends=None))
            for keeper in self._supervisors
        ]
        try:
            return await self._owner.run()
        finally:
            children = [keeper.child for keeper in self._supervisors if keeper.child is not None]
            # The job is over: supervisors end by themselves or are killed.
            await asyncio.gather(*(child.end(2 * self._timing.grace_s) for child in children))
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.to_thread(self._remove_left)
            os.close(self._secret_fd)

    def ask_stop(self, number: signal.Signals) -> None:
        """The coordinator hears of it through the monitor, and ends the job in order."""
        self._owner.send(number)

    def kill(self) -> None:
        """SIGKILL everything, now, and remove what it leaves; blocks until that is free."""
        self._owner.send(signal.SIGKILL)
        for keeper in self._supervisors:
            keeper.send(signal.SIGKILL)
        self._remove_left()

    def _remove_left(self) -> None:
        """Where processes had to be killed; there is nothing where they ended in order."""
        if self._owner.run_dir is not None:
            remove_left(Path(self._owner.run_dir), [self._place.host], self._timing.grace_s)

    def _keeper(self, rank: int) -> Keeper:
        num_starts = 0

        def start() -> Child:
            nonlocal num_starts
            num_starts += 1
            return self._start_supervisor(rank, was_restarted=num_starts > 1)

        return Keeper(f"the supervisor of rank {rank}", start, self._timing)

    def _start_supervisor(self, rank: int, *, was_restarted: bool) -> Child:
        num_local = len(self._ranks)
        env = dict(os.environ)
        env.update(RANK=str(rank), LOCAL_RANK=str(rank % num_local))
        env.update(WORLD_SIZE=str(self._world), LOCAL_WORLD_SIZE=str(num_local))
        env.update({HOST: self._place.host, PORT: str(self._place.port)})
        env[SECRET_FD] = str(self._secret_fd)
        if was_restarted:
            env[RESTARTED] = "1"
        return Child(
            [sys.executable, *self._worker],
            env=env,
            pass_fds=[self._secret_fd],
            own_group=True,
            block_signals=True,
        )


async def run_until_signal(node: LocalNode) -> int:
    """Run a node; a signal ends the job in order, a second one or too long a wait at once."""
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        node.ask_stop(number)
        loop.call_later(node.grace_s, endings.end)

    endings = Endings(ask, node.kill)
    return endings.code(await node.run())


def remove_left(run_dir: Path, hosts: Iterable[str], within_s: float) -> None:
    """Remove what processes of a run at `hosts` of this machine left that were just killed.

    Blocks until they let go of it, for each host at most `within_s`.
    """
    with contextlib.suppress(OSError):
        RunDir.control_of(run_dir).unlink(missing_ok=True)
    for host in hosts:
        remove_once_unheld(shared_path(run_dir.name, host), within_s)


def main(listen_fd: int, brief_fd: int, job_path: str) -> int:
    """Be one node; the exit code of the job."""

    async def serve() -> int:
        with socket.socket(fileno=listen_fd) as listener:
            return await run_until_signal(LocalNode(read_brief(brief_fd), listener, Path(job_path)))

    try:
        return run(serve())
    except ResihpError as error:
        complain(f"resihp: error: {error}")
        return error.exit_code


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
