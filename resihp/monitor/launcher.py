"""`resihp train`: starts one supervisor per rank on this machine, as torchrun would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from resihp.config import JobConfig
from resihp.monitor.process import ENDINGS, Child
from resihp.monitor.rendezvous import LISTEN_FD, PORT, SECRET_FD, listen, secret_file
from resihp.wire.auth import new_secret
from resihp.wire.timing import Timing

__all__ = ["Launcher"]


class Launcher:
    """Owns the supervisors of one job; `run` returns the job's exit code."""

    def __init__(
        self,
        job: JobConfig,
        job_path: Path,
        *,
        inject: bool = True,
        worker: Sequence[str] = ("-m", "resihp.worker"),
    ) -> None:
        """`worker` is what Python runs as a supervisor, `inject` whether faults are injected."""
        self._job = job
        self._worker = [*worker, str(job_path), *([] if inject else ["--no-inject"])]
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._children: list[Child] = []
        self._signal: signal.Signals | None = None
        self._asked_to_stop = asyncio.Event()

    async def run(self) -> int:
        """Start the job and wait for its end. No process of it is left when this returns."""
        loop = asyncio.get_running_loop()
        for number in ENDINGS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._start()
        finished = asyncio.create_task(self._children[0].wait())
        stopping = asyncio.create_task(self._stop_on_signal())
        try:
            code = await finished
        finally:
            stopping.cancel()
            await self._end_all()
        if self._signal is not None:
            return 128 + self._signal
        if code < 0:
            print(
                f"resihp: error: the coordinator (rank 0's supervisor) ended with signal {-code}; "
                "this version does not replace it, so the job is over",
                file=sys.stderr,
            )
        return code if code >= 0 else 128 - code

    def _start(self) -> None:
        secret_fd = secret_file(new_secret())
        with listen() as listener:
            for rank in range(self._job.parallel.world):
                self._children.append(self._start_supervisor(rank, listener, secret_fd))
        os.close(secret_fd)

    def _start_supervisor(self, rank: int, listener: socket.socket, secret_fd: int) -> Child:
        world = str(self._job.parallel.world)
        env = dict(os.environ)
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        env.update({PORT: str(listener.getsockname()[1]), SECRET_FD: str(secret_fd)})
        pass_fds = [secret_fd]
        if rank == 0:
            env[LISTEN_FD] = str(listener.fileno())
            pass_fds.append(listener.fileno())
        return Child(
            [sys.executable, *self._worker],
            env=env,
            pass_fds=pass_fds,
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
        await self._asked_to_stop.wait()
        assert self._signal is not None
        for child in self._children:
            child.send(self._signal)
        await asyncio.sleep(4 * self._timing.grace_s)
        self._kill_all()

    def _kill_all(self) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)

    async def _end_all(self) -> None:
        """The coordinator is gone: the other supervisors end by themselves or are killed."""
        await asyncio.gather(*(child.end(2 * self._timing.grace_s) for child in self._children))
