"""What an injected fault does to this executor: one small class for each kind.

A fault strikes on the stream's thread, right before an instruction. Faults that last leave a
condition behind, which the work, the wire and the writers of state look at.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from resihp.config import Injection
from resihp.config.injection import DEFAULT_DELAY_S

__all__ = ["Conditions", "Fault", "InjectedError", "Lasting", "fault_of"]

EXIT_CODE = 1
DEFAULT_FACTOR = 2.0


class InjectedError(Exception):
    """The error that `kind = "exception"` raises."""


class Lasting:
    """A value that holds for some seconds, and `usual` before and after."""

    def __init__(self, usual: float) -> None:
        self._usual = self._value = usual
        self._until_s = 0.0

    def set(self, value: float, lasts_s: float | None) -> None:
        """`value` from now on, for `lasts_s` (None: for ever)."""
        self._until_s = time.monotonic() + lasts_s if lasts_s is not None else float("inf")
        self._value = value

    @property
    def now(self) -> float:
        """The value at this moment."""
        if self._value != self._usual and time.monotonic() >= self._until_s:
            self._value = self._usual
        return self._value


class Conditions:
    """What lasting faults do to this process, from any thread."""

    def __init__(self) -> None:
        self.slowness = Lasting(1.0)
        """How many times as long an instruction takes."""
        self.link_delay_s = Lasting(0.0)
        """How much later a message leaves."""
        self._disk = Lasting(0.0)
        self._tears_next = Lasting(0.0)

    def fill_disk(self, lasts_s: float | None) -> None:
        """No file of state can be written from now on."""
        self._disk.set(1.0, lasts_s)

    def tear_next(self) -> None:
        """The next part of a checkpoint is torn, and this process dies with it."""
        self._tears_next.set(1.0, None)

    def check_disk(self) -> None:
        """Before a file of state is written: OSError (ENOSPC) where the disk is full by order."""
        if self._disk.now:
            raise OSError(errno.ENOSPC, "no space left (injected)")

    def tear(self, write_half: Callable[[], object]) -> None:
        """Before a file of a checkpoint is written: `write_half` of it and die, where ordered."""
        if self._tears_next.now:
            write_half()
            os.kill(os.getpid(), signal.SIGKILL)


class Fault(Protocol):
    """One kind of fault, ready to strike."""

    def strike(self) -> None:
        """Bring it about. It was announced before."""
        ...


class Signal(NamedTuple):
    """A signal to this process itself: it stops or ends here and now."""

    number: signal.Signals

    def strike(self) -> None:
        """See `Fault`."""
        os.kill(os.getpid(), self.number)


class Exit:
    """The process leaves without a word."""

    def strike(self) -> None:
        """See `Fault`."""
        os._exit(EXIT_CODE)


class Raise:
    """An error in the code that runs."""

    def strike(self) -> None:
        """See `Fault`. Raises InjectedError."""
        raise InjectedError("an exception was injected here")


class HoldGil(NamedTuple):
    """No other thread of the process runs: a call into C that keeps the interpreter's lock."""

    lasts_s: float

    def strike(self) -> None:
        """See `Fault`."""
        holding = ctypes.PyDLL(None)  # unlike CDLL it does not let go of the lock
        end_s = time.monotonic() + self.lasts_s
        while (left_s := end_s - time.monotonic()) > 0:
            holding.poll(None, 0, max(1, round(1000 * left_s)))


class Slow(NamedTuple):
    """Instructions take longer."""

    conditions: Conditions
    factor: float
    lasts_s: float | None

    def strike(self) -> None:
        """See `Fault`."""
        self.conditions.slowness.set(self.factor, self.lasts_s)


class SlowLink(NamedTuple):
    """Messages to other ranks leave later."""

    conditions: Conditions
    delay_s: float
    lasts_s: float | None

    def strike(self) -> None:
        """See `Fault`."""
        self.conditions.link_delay_s.set(self.delay_s, self.lasts_s)


class FullDisk(NamedTuple):
    """No file of state can be written."""

    conditions: Conditions
    lasts_s: float | None

    def strike(self) -> None:
        """See `Fault`."""
        self.conditions.fill_disk(self.lasts_s)


class TornCheckpoint(NamedTuple):
    """Death in the middle of writing the next part of a checkpoint."""

    conditions: Conditions

    def strike(self) -> None:
        """See `Fault`."""
        self.conditions.tear_next()


class Around:
    """Somebody around this process carries it out, who reads the announcement."""

    def strike(self) -> None:
        """See `Fault`."""


def fault_of(injection: Injection, conditions: Conditions) -> Fault:
    """The fault that `injection` names, for a process under `conditions`."""
    lasts_s = injection.lasts_s
    match injection.kind:
        case "kill":
            return Signal(signal.SIGKILL)
        case "stop":
            return Signal(signal.SIGSTOP)
        case "exit":
            return Exit()
        case "exception":
            return Raise()
        case "hold_gil":
            assert lasts_s is not None, "checked when the job was read"
            return HoldGil(lasts_s)
        case "slow":
            return Slow(conditions, injection.factor or DEFAULT_FACTOR, lasts_s)
        case "slow_link":
            return SlowLink(conditions, injection.delay_s or DEFAULT_DELAY_S, lasts_s)
        case "full_disk":
            return FullDisk(conditions, lasts_s)
        case "torn_checkpoint":
            return TornCheckpoint(conditions)
        case _:
            return Around()
