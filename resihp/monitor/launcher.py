"""`resihp train`: starts a monitor and one supervisor per rank on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from resihp.config import JobConfig, resolved
from resihp.monitor.keeper import Keeper
from resihp.monitor.node.brief import Brief
from resihp.monitor.node.owner import NodeOwner
from resihp.monitor.process import ENDINGS, Child
from resihp.monitor.rendezvous import PORT, RESTARTED, SECRET_FD, listen, secret_file
from resihp.monitor.run_dir import announce_run
from resihp.wire.auth import new_secret
from resihp.wire.timing import Timing

__all__ = ["Launcher"]


class Launcher:
    """Owns the processes of one job; `run` returns the job's exit code."""

    def __init__(
        self,
        job: JobConfig,
        job_path: Path,
        *,
        inject: bool = True,
        leader: Sequence[str] = ("-m", "resihp.monitor.leader"),
    ) -> None:
        """`leader` is what Python runs as coordinator, `inject` whether faults are injected."""
        self._job = job
        self._leader = tuple(leader)
        self._worker = ["-m", "resihp.worker", str(job_path), *([] if inject else ["--no-inject"])]
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._supervisors: list[Keeper] = []
        self._owner: NodeOwner | None = None
        self._signal: signal.Signals | None = None
        self._asked_to_stop = asyncio.Event()

    async def run(self) -> int:
        """Start the job and wait for its end. No process of it is left when this returns.

        Raises ResihpError where the node's monitor cannot be kept alive.
        """
        loop = asyncio.get_running_loop()
        for number in ENDINGS:
            loop.add_signal_handler(number, self._on_signal, number)
        secret = new_secret()
        secret_fd = secret_file(secret)
        try:
            with listen() as listener:
                return await self._run(listener, secret, secret_fd)
        finally:
            os.close(secret_fd)

    async def _run(self, listener: socket.socket, secret: bytes, secret_fd: int) -> int:
        brief = Brief(
            job=resolved(self._job),
            secret=secret,
            node=0,
            addresses=(listener.getsockname(),),
            run_dir=str(announce_run(self._job).path),
            leader=self._leader,
        )
        self._owner = NodeOwner(brief, listener, self._timing)
        port = listener.getsockname()[1]
        self._supervisors = [
            self._keeper(self._owner, rank, port, secret_fd)
            for rank in range(self._job.parallel.world)
        ]
        keeping = [asyncio.create_task(keeper.run()) for keeper in self._supervisors]
        stopping = asyncio.create_task(self._stop_on_signal())
        try:
            code = await self._owner.run()
        finally:
            stopping.cancel()
            await self._end_all()
            for task in keeping:
                task.cancel()
            await asyncio.gather(stopping, *keeping, return_exceptions=True)
        return code if self._signal is None else 128 + self._signal

    def _keeper(self, owner: NodeOwner, rank: int, port: int, secret_fd: int) -> Keeper:
        num_starts = 0

        def start() -> Child:
            nonlocal num_starts
            num_starts += 1
            return self._start_supervisor(rank, port, secret_fd, was_restarted=num_starts > 1)

        return Keeper(
            f"the supervisor of rank {rank}",
            start,
            lambda _: owner.is_over,
            self._timing,
            max_quick_ends=None,
        )

    def _start_supervisor(
        self, rank: int, port: int, secret_fd: int, *, was_restarted: bool
    ) -> Child:
        world = str(self._job.parallel.world)
        env = dict(os.environ)
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        env.update({PORT: str(port), SECRET_FD: str(secret_fd)})
        if was_restarted:
            env[RESTARTED] = "1"
        return Child(
            [sys.executable, *self._worker],
            env=env,
            pass_fds=[secret_fd],
            new_session=True,
            block_signals=True,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is not None:
            self._kill_all()
            os._exit(128 + number)
        self._signal = number
        self._asked_to_stop.set()

    async def _stop_on_signal(self) -> None:
        """The coordinator hears of it through the monitor, and ends the job in order."""
        await self._asked_to_stop.wait()
        assert self._signal is not None
        assert self._owner is not None
        self._owner.send(self._signal)
        await asyncio.sleep(4 * self._timing.grace_s)
        self._kill_all()
        os._exit(128 + self._signal)

    def _kill_all(self) -> None:
        if self._owner is not None:
            self._owner.send(signal.SIGKILL)
        for keeper in self._supervisors:
            keeper.send(signal.SIGKILL)

    async def _end_all(self) -> None:
        """The job is over: supervisors end by themselves or are killed."""
        children = [keeper.child for keeper in self._supervisors if keeper.child is not None]
        await asyncio.gather(*(child.end(2 * self._timing.grace_s) for child in children))
