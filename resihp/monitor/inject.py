"""Faults that a supervisor brings about: signals to its executor, and what befalls its beats.

An executor that comes to the place of an injection announces it (`Fault`) and carries out what is
its own; what is the supervisor's is carried out here, when the announcement has gone on. An
operator's order (`Inject`) comes the other way.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from msgspec import ValidationError, convert

from resihp.config import Injection, JobConfig, lasting_kinds
from resihp.config.injection import DEFAULT_DELAY_S
from resihp.wire.clock import Clock
from resihp.wire.messages import Fault, Inject

__all__ = ["BeatFault", "Body", "LateBeats", "LostBeats", "SupervisorFaults", "die", "hang"]

DEFAULT_SHARE = 1.0
HANG_S = 3600.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


async def die(told: Awaitable[None]) -> None:
    """SIGKILL this process once others are `told` of it."""
    await told
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Keep the event loop of this process from turning, until somebody kills it."""
    time.sleep(HANG_S)


class Body(Protocol):
    """What faults are done to: a supervisor with its executor."""

    def signal_executor(self, number: signal.Signals) -> None:
        """Send a signal to the executor, if there is one."""
        ...

    def send_up(self, fault: Fault) -> None:
        """Announce a fault to the coordinator."""
        ...

    def send_down(self, order: Inject) -> None:
        """Pass an order on to the executor."""
        ...

    def die(self) -> None:
        """SIGKILL this process once what it announced is out."""
        ...


class BeatFault(Protocol):
    """What befalls a beat."""

    def hold_s(self, now_s: float) -> float | None:
        """How much later it leaves; 0: at once, None: never."""
        ...


class LateBeats(NamedTuple):
    """Beats leave later."""

    delay_s: float
    until_s: float

    def hold_s(self, now_s: float) -> float:
        """See `BeatFault`."""
        return self.delay_s if now_s < self.until_s else 0.0


class LostBeats(NamedTuple):
    """A share of the beats never leaves."""

    share: float
    until_s: float
    draw: random.Random

    def hold_s(self, now_s: float) -> float | None:
        """See `BeatFault`."""
        return None if now_s < self.until_s and self.draw.random() < self.share else 0.0


class SupervisorFaults:
    """Carries out what is the supervisor's part of injected faults. For the loop's thread."""

    def __init__(self, job: JobConfig, body: Body, clock: Clock) -> None:
        self._job = job
        self._body = body
        self._clock = clock
        self._beats: BeatFault | None = None
        self._ordered: list[Injection] = []
        """An operator's faults that the executor has not come to yet, in order."""
        self.stopped_at_s = float("inf")
        """When the executor was stopped for good; infinity: it was not."""
        self.struck: dict[int, int] = {}
        """The last step that each injection of the job struck in, for the next executor."""

    def announced(self, fault: Fault) -> None:
        """The executor comes to the place of a fault; its announcement has gone on."""
        if 0 <= fault.number < len(self._job.inject):
            self.struck[fault.number] = fault.step
            self._carry_out(self._job.inject[fault.number], is_here=False)
            return
        waiting = (each for each in self._ordered if each.kind == fault.kind)
        ordered = next(waiting, None)
        if ordered is not None:
            self._ordered.remove(ordered)
            self._carry_out(ordered, is_here=False)

    def ordered(self, order: Inject) -> None:
        """An operator wants a fault."""
        try:
            injection = convert(order.fault, Injection)
        except ValidationError:
            return  # the operator's side has checked it: this is not ours to answer
        is_here = injection.instruction is None and injection.moment is None
        if not is_here or injection.kind in ("exit", "exception", "torn_checkpoint"):
            self._ordered.append(injection)
            self._body.send_down(order)  # the executor announces it at its place
            return
        self._body.send_up(
            Fault(kind=injection.kind, step=-1, instruction=-1, at_s=self._clock.now_s())
        )
        if injection.kind in lasting_kinds() and injection.kind != "stop":
            self._body.send_down(order)
        self._carry_out(injection, is_here=True)

    def started(self) -> None:
        """A fresh executor knows nothing of what its predecessor was ordered."""
        self._ordered.clear()

    def beat(self, send: Callable[[], None]) -> None:
        """Send a beat now, later or never."""
        hold_s = 0.0 if self._beats is None else self._beats.hold_s(self._clock.now_s())
        if hold_s:
            asyncio.get_running_loop().call_later(hold_s, send)
        elif hold_s is not None:
            send()

    def _carry_out(self, injection: Injection, *, is_here: bool) -> None:
        """Do the supervisor's part; `is_here`: the executor does nothing of it."""
        kind, lasts_s = injection.kind, injection.lasts_s
        until_s = float("inf") if lasts_s is None else self._clock.now_s() + lasts_s
        if is_here and kind in _SIGNALS:
            self._body.signal_executor(_SIGNALS[kind])
        if kind == "stop" and lasts_s is None:
            self.stopped_at_s = self._clock.now_s()
        elif kind == "stop":
            loop = asyncio.get_running_loop()
            assert lasts_s is not None
            loop.call_later(lasts_s, self._body.signal_executor, signal.SIGCONT)
        elif kind == "late_beats":
            self._beats = LateBeats(injection.delay_s or DEFAULT_DELAY_S, until_s)
        elif kind == "lost_beats":
            share = DEFAULT_SHARE if injection.share is None else injection.share
            self._beats = LostBeats(share, until_s, random.Random(injection.seed))
        elif kind == "kill_supervisor":
            self._body.die()
