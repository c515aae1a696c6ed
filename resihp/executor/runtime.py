"""The executor of one rank: obeys its supervisor and runs one session at a time.

What it runs on, and with which state, is the backend's: training, or emulated devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from typing import Protocol, cast

import msgspec
from msgspec import convert

from resihp.config import Injection, JobConfig
from resihp.errors import GenerationClosed, ResihpError, UserError
from resihp.executor.boundary import Agreement, Ask
from resihp.executor.inject import Injector
from resihp.executor.joining import Joining
from resihp.executor.lateness import Lateness
from resihp.executor.pause import announce_pauses, current_pause
from resihp.wire.channel import Channel
from resihp.wire.console import complain, say
from resihp.wire.messages import (
    AskWhere,
    At,
    Beat,
    Close,
    Deploy,
    Go,
    HeldSums,
    Inject,
    Message,
    Ready,
    Request,
    Save,
    Sealed,
    Settled,
    StepRecord,
    Stop,
    StoreAt,
    Trouble,
)
from resihp.wire.timing import Timing

__all__ = ["Backend", "Executor", "Session", "State"]


class State(Protocol):
    """What a rank holds between iterations, as far as the coordinator asks."""

    agreement: Agreement

    @property
    def version(self) -> int:
        """Completed steps."""
        ...

    @property
    def voted(self) -> int:
        """Steps whose vote this rank saw complete."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer updates applied."""
        ...

    @property
    def record(self) -> StepRecord | None:
        """Of the newest vote."""
        ...

    @property
    def layouts(self) -> tuple[int, ...]:
        """Generations whose layout this rank can continue from."""
        ...

    def sealed(self) -> tuple[Sealed, ...]:
        """The snapshots in the memory of this node; reads files."""
        ...

    def report_held(self) -> tuple[int, int, tuple[HeldSums, ...]]:
        """The interrupted iteration of which something is complete here (-1: none), the generation
        whose layout that has, and what it is."""
        ...


class Session(Protocol):
    """One generation on this rank."""

    joining: Joining

    def at(self) -> At:
        """Where it is; how long it has been there is for the caller to say."""
        ...

    async def run(self) -> bool:
        """Join the generation and run it to the end of the job, or until all agree to yield.

        Whether they did; the session is to be left then, and the next generation comes.
        """
        ...

    async def leave(self) -> None:
        """Stop everything of this generation; returns when the streams are idle."""
        ...


class Backend(Protocol):
    """What an executor runs on, for the life of its process."""

    @property
    def injector(self) -> Injector:
        """Whom an operator's order of a fault goes to."""
        ...

    @property
    def state(self) -> State:
        """The state over all generations."""
        ...

    @property
    def position(self) -> int:
        """Instruction that runs now; -1: idle."""
        ...

    async def open(self) -> Ready:
        """Get ready; what the coordinator is told of it."""
        ...

    def session(self, deploy: Deploy) -> Session:
        """A session for a generation; the one before has been left."""
        ...

    async def save(self, order: Save) -> None:
        """Write this rank's part of the settled state to disk, and say so; no session runs."""
        ...


class Executor:
    """`run` serves until the job stops and returns the exit code of this process."""

    def __init__(self, job: JobConfig, channel: Channel, backend: Backend) -> None:
        self._channel = channel
        self._backend = backend
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._generation = 0
        self._last_at: At | None = None
        self._at_since_s = 0.0
        self._leaving = asyncio.Lock()
        self._lateness = Lateness()

    async def run(self) -> int:
        """Get ready, then do what the coordinator says."""
        self._send(await self._backend.open())
        obeying = asyncio.create_task(self._obey())
        beating = asyncio.create_task(self._beat())
        announce_pauses(self._send_beat)
        await asyncio.wait([obeying, self._failure], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
        if self._failure.done():
            obeying.cancel()
            return self._failure.result()
        return obeying.result()

    def _send(self, message: Message) -> None:
        self._channel.send(message)

    async def _obey(self) -> int:
        while (message := await self._channel.receive()) is not None:
            match message:
                case Stop():
                    say(str(self._lateness))
                    return message.exit_code
                case Close():
                    await self._close(message.generation)
                case Deploy() if self._is_new(message.generation):
                    self._open(message)
                case StoreAt() if self._is_current(message.generation):
                    assert self._session is not None
                    self._session.joining.opened(message.address)
                case Request() if self._is_current(message.generation):
                    self._backend.state.agreement.ask(Ask.of(message.what))
                case Save() if message.generation == self._generation and self._task is None:
                    self._task = asyncio.create_task(self._save(message))
                case AskWhere():
                    self._send(self._where())
                case Inject():
                    self._backend.injector.order(convert(message.fault, Injection))
                case Go() if self._is_current(message.generation):
                    assert self._session is not None
                    self._session.joining.went()
                    self._send_beat()
                case _:
                    pass  # of a generation that is over
        return 1  # the supervisor is gone, and we with it

    def _is_new(self, generation: int) -> bool:
        return generation >= self._generation and not self._is_current(generation)

    def _is_current(self, generation: int) -> bool:
        return self._session is not None and self._session.joining.generation == generation

    # --- generations

    def _open(self, deploy: Deploy) -> None:
        self._generation = deploy.generation
        self._backend.state.agreement.clear()
        self._session = self._backend.session(deploy)
        self._task = asyncio.create_task(self._run_session(self._session))

    async def _run_session(self, session: Session) -> None:
        try:
            if await session.run():
                await self._yield(session)
        except* GenerationClosed:
            pass
        except* UserError as group:
            # Another generation would end the same way: the coordinator ends the job with it.
            complain(f"resihp: error: {_leaves(group)[0]}")
            if not self._failure.done():
                self._failure.set_result(UserError.exit_code)
        except* ResihpError as group:
            # A peer may be gone. The verdict comes from the coordinator, as `Close`.
            session.joining.is_broken = True
            what = "; ".join(str(error) for error in _leaves(group))
            self._send(Trouble(generation=session.joining.generation, what=what))
        except* Exception:
            traceback.print_exc()
            if not self._failure.done():
                self._failure.set_result(1)

    async def _save(self, order: Save) -> None:
        try:
            await self._backend.save(order)
        except Exception:
            traceback.print_exc()
            if not self._failure.done():
                self._failure.set_result(1)

    async def _close(self, generation: int) -> None:
        """Leave what runs, then say what state we hold."""
        noticed_s = time.monotonic()
        async with self._leaving:
            self._generation = generation
            if self._task is not None:
                if self._session is not None:
                    await self._session.leave()
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task
                self._session = self._task = None
            await self._settle(noticed_s)

    async def _yield(self, session: Session) -> None:
        """All members agreed to end their generation here; part of the session's own task.

        A `Close` that comes meanwhile waits for us, or cancels us where it was first.
        """
        noticed_s = time.monotonic()
        async with self._leaving:
            await session.leave()
            self._generation = session.joining.generation + 1
            self._session = self._task = None
            await self._settle(noticed_s)

    async def _settle(self, noticed_s: float) -> None:
        """Say what state we hold, for the generation that comes."""
        state = self._backend.state
        held_step, held_layout, held = state.report_held()
        self._send(
            Settled(
                generation=self._generation,
                version=state.version,
                voted=state.voted,
                updates=state.updates,
                record=state.record,
                layouts=state.layouts,
                noticed_s=noticed_s,
                snapshots=await asyncio.to_thread(state.sealed),
                held_step=held_step,
                held_layout=held_layout,
                held=held,
            )
        )
        self._send_beat()

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
            due_s = time.monotonic() + self._timing.report_s
            await asyncio.sleep(self._timing.report_s)
            self._where()
            if self._backend.position >= 0:
                self._lateness.add(time.monotonic() - due_s)
            self._send_beat()

    def _send_beat(self) -> None:
        self._send(
            Beat(
                step=self._backend.state.version,
                instruction=self._backend.position,
                pause=current_pause(),
                generation=self._generation,
                runs=self._session is not None and self._session.joining.runs,
            )
        )


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for inner in group.exceptions for leaf in _leaves(inner)]
