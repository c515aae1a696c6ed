"""The backend of an executor with an emulated device: control plane and transport are real."""

from __future__ import annotations

from collections.abc import Callable

from resihp.config import JobConfig
from resihp.executor.emulation.clock import Clock
from resihp.executor.emulation.session import EmulatedSession
from resihp.executor.emulation.state import EmulatedState
from resihp.executor.emulation.stream import EmulatedStream
from resihp.executor.inject import Injector, announcer
from resihp.executor.transport import Transport
from resihp.wire.messages import Deploy, Message, Ready, Save, Start
from resihp.wire.timing import Timing

__all__ = ["EmulatedBackend"]


class EmulatedBackend:
    """See `resihp.executor.runtime.Backend`."""

    def __init__(self, job: JobConfig, start: Start, send: Callable[[Message], None]) -> None:
        rank = start.rank
        self._job = job
        self._rank = rank
        self._send = send
        timing = Timing.from_detect_within(job.job.detect_within_s)
        self.state = EmulatedState()
        self._clock = Clock()
        self._compute = EmulatedStream(self._clock, rank)
        self._comm = EmulatedStream(self._clock, rank)
        self._transport = Transport(
            job.job.name, rank, timeout_s=timing.handshake_s, host=start.host
        )
        self.injector = Injector(
            job.inject,
            rank,
            announcer(send),
            world=job.parallel.world,
            struck=start.struck,
            is_on_loop=True,
        )
        self._compute.slowness = self.injector.conditions.slowness

    @property
    def position(self) -> int:
        """See `Backend`."""
        return self._compute.position if self._compute.position >= 0 else self._comm.position

    async def open(self) -> Ready:
        """See `Backend`. No data is read."""
        address = await self._transport.open()
        return Ready(address=address, dataset_digest="emulated", num_samples=0, num_skipped_files=0)

    def session(self, deploy: Deploy) -> EmulatedSession:
        """See `Backend`."""
        return EmulatedSession(
            self._job,
            self._rank,
            deploy,
            state=self.state,
            clock=self._clock,
            compute=self._compute,
            comm=self._comm,
            transport=self._transport,
            injector=self.injector,
            send=self._send,
        )

    async def save(self, order: Save) -> None:
        """See `Backend`. A coordinator of emulated devices never asks for it."""
        raise AssertionError("there is no state to save")
