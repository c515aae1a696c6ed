"""What a supervisor must be able to say again: to a monitor or a coordinator that is new.

Pure. Everything else that an executor says is news of a moment, and lost with who lost it.
"""

from __future__ import annotations

from collections import deque

import msgspec

from resihp.wire.messages import (
    ExecutorExited,
    ExecutorStarted,
    Finished,
    Joined,
    Message,
    PartSaved,
    Ready,
    Settled,
    StepDone,
    StoreOpened,
    Trouble,
)

__all__ = ["Replay"]

MAX_STEPS = 4096
"""Steps that can be told to a coordinator that was not there; a few hundred bytes each."""

_ORDER = (
    ExecutorStarted,
    Ready,
    Settled,
    StoreOpened,
    Joined,
    Trouble,
    PartSaved,
    Finished,
    ExecutorExited,
)
"""Kinds of which the last one counts, in the order in which they are said again. A trouble names
its generation: one of a generation that is over says nothing any more."""


class Replay:
    """The memory of one supervisor, of the executor that it started last."""

    def __init__(self) -> None:
        self._last: dict[type[Message], Message] = {}
        self._steps: deque[StepDone] = deque(maxlen=MAX_STEPS)

    def keep(self, message: Message) -> None:
        """`message` was sent, or should have been; a new executor voids what the last one said."""
        if isinstance(message, ExecutorStarted):
            self._last.clear()
        if isinstance(message, StepDone):
            self._steps.append(msgspec.structs.replace(message, observed=None))
        elif isinstance(message, _ORDER):
            self._last[type(message)] = message

    def messages(self, from_step: int) -> list[Message]:
        """What to say again; of the steps those from `from_step` on, before what came of them."""
        last = [self._last[kind] for kind in _ORDER if kind in self._last]
        steps = [step for step in self._steps if step.record.step >= from_step]
        is_late = [isinstance(message, Finished | ExecutorExited) for message in last]
        cut = is_late.index(True) if True in is_late else len(last)
        return [*last[:cut], *steps, *last[cut:]]
