"""The executor of one rank: obeys its supervisor, owns the state, runs one session at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from typing import cast

import msgspec

from resihp.config import JobConfig
from resihp.errors import GenerationClosed, ResihpError
from resihp.executor.data import Dataset, load_dataset
from resihp.executor.device.choose import device_of
from resihp.executor.inject import Injector
from resihp.executor.lateness import Lateness
from resihp.executor.packing import Packing
from resihp.executor.pause import current_pause
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.executor.session import Session, in_thread
from resihp.executor.state import TrainState
from resihp.executor.stream import Event
from resihp.wire.channel import Channel
from resihp.wire.messages import (
    AskWhere,
    At,
    Beat,
    Close,
    Deploy,
    Fault,
    Go,
    Message,
    Ready,
    Settled,
    Stop,
    StoreAt,
    Trouble,
)
from resihp.wire.timing import Timing

__all__ = ["Executor"]


class Executor:
    """`run` serves until the job stops and returns the exit code of this process."""

    def __init__(self, job: JobConfig, rank: int, channel: Channel) -> None:
        self._job = job
        self._rank = rank
        self._channel = channel
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._state = TrainState(job)
        self._device = device_of(job, rank, timeout_s=self._timing.handshake_s)
        self._injector = Injector(job.inject, rank, self._announce)
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[int] = self._loop.create_future()
        self._generation = 0
        self._last_at: At | None = None
        self._at_since_s = 0.0
        self._lateness = Lateness()

    async def run(self) -> int:
        """Get ready, then do what the coordinator says."""
        port = await self._device.open()
        self._batches, dataset = await in_thread(self._load_data)
        self._send(
            Ready(
                port=port,
                dataset_digest=dataset.digest,
                num_samples=self._batches.num_samples,
                num_skipped_files=dataset.num_skipped,
            )
        )
        obeying = asyncio.create_task(self._obey())
        beating = asyncio.create_task(self._beat())
        await asyncio.wait([obeying, self._failure], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
        if self._failure.done():
            obeying.cancel()
            return self._failure.result()
        return obeying.result()

    def _load_data(self) -> tuple[GlobalBatches, Dataset]:
        job = self._job
        dataset = load_dataset(job.data.source)
        packing = Packing(dataset, job.batch.tokens, job.job.seed)
        sampler = Sampler(packing.num_windows, job.job.seed)
        batches = GlobalBatches(packing, sampler, job.parallel.dp, job.batch.microbatches)
        return batches, dataset

    def _send(self, message: Message) -> None:
        self._channel.send(message)

    async def _obey(self) -> int:
        while (message := await self._channel.receive()) is not None:
            match message:
                case Stop():
                    print(self._lateness, flush=True)
                    return message.exit_code
                case Close():
                    await self._close(message.generation)
                case Deploy() if message.generation >= self._generation:
                    self._open(message)
                case StoreAt() if self._is_current(message.generation):
                    assert self._session is not None
                    if not self._session.store_port.done():
                        self._session.store_port.set_result(message.port)
                case AskWhere():
                    self._send(self._where())
                case Go() if self._is_current(message.generation):
                    assert self._session is not None
                    if not self._session.go.done():
                        self._session.go.set_result(None)
                case _:
                    pass  # of a generation that is over
        return 1  # the supervisor is gone, and we with it

    def _is_current(self, generation: int) -> bool:
        return self._session is not None and self._session.generation == generation

    # --- generations

    def _open(self, deploy: Deploy) -> None:
        self._generation = deploy.generation
        self._session = Session(
            self._job,
            self._rank,
            deploy,
            state=self._state,
            device=self._device,
            batches=self._batches,
            injector=self._injector,
            send=self._send,
        )
        self._task = asyncio.create_task(self._run_session(self._session))

    async def _run_session(self, session: Session) -> None:
        try:
            await session.run()
        except* GenerationClosed:
            pass
        except* ResihpError as group:
            # A peer may be gone. The verdict comes from the coordinator, as `Close`.
            what = "; ".join(str(error) for error in _leaves(group))
            self._send(Trouble(generation=session.generation, what=what))
        except* Exception:
            traceback.print_exc()
            if not self._failure.done():
                self._failure.set_result(1)

    async def _close(self, generation: int) -> None:
        """Leave what runs, then say what state we hold."""
        noticed_s = time.monotonic()
        self._generation = generation
        if self._session is not None and self._task is not None:
            await self._session.leave()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._session = self._task = None
        state = self._state
        self._send(
            Settled(
                generation=generation,
                version=state.version,
                voted=state.voted,
                updates=state.updates,
                record=state.record,
                layouts=state.layouts,
                noticed_s=noticed_s,
            )
        )

    # --- signs of life and death

    def _where(self) -> At:
        """Where this rank is, and since when."""
        session = self._session
        if session is None:
            doing = "waits for a plan"
            at = At(generation=self._generation, runs=False, doing=doing)
        else:
            at = session.at()
        now_s = time.monotonic()
        if at != self._last_at:
            self._last_at, self._at_since_s = at, now_s
        return msgspec.structs.replace(at, since_s=now_s - self._at_since_s, pause=current_pause())

    async def _beat(self) -> None:
        while True:
            due_s = time.monotonic() + self._timing.beat_s
            await asyncio.sleep(self._timing.beat_s)
            self._where()
            instruction = self._position
            if instruction >= 0:
                self._lateness.add(time.monotonic() - due_s)
            self._send(
                Beat(step=self._state.version, instruction=instruction, pause=current_pause())
            )

    @property
    def _position(self) -> int:
        """Instruction that computes or else communicates now; -1: none."""
        compute, comm = self._device.compute.position, self._device.comm.position
        return compute if compute >= 0 else comm

    def _announce(self, kind: str, step: int, index: int, sent: Event) -> None:
        def send() -> None:
            at_s = time.monotonic()
            self._send(Fault(kind=kind, step=step, instruction=index, at_s=at_s))
            sent.set()

        self._loop.call_soon_threadsafe(send)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for inner in group.exceptions for leaf in _leaves(inner)]
