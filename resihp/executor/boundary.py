"""What ranks do together between two iterations, agreed on in the vote.

The coordinator asks any one rank (`Request`). That rank brings the wish into its next vote, and
every member sees in the outcome what any of them brought, so all of them act after the same step.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Awaitable, Callable, Sequence

__all__ = ["Agreement", "Ask", "Boundary", "Duty"]


class Ask(enum.IntFlag):
    """What the coordinator may ask for; the bits that a vote carries."""

    NOTHING = 0
    YIELD = 1
    """End the iterations of this generation here and settle for the next one."""
    CHECKPOINT = 2
    AUDIT = 4

    @classmethod
    def of(cls, what: str) -> Ask:
        """By the name that `Request` has."""
        return cls[what.upper()]


class Agreement:
    """What one rank was asked for, and what all agreed on in the newest vote. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = Ask.NOTHING
        self._agreed = Ask.NOTHING

    @property
    def agreed(self) -> Ask:
        """What all ranks do after the step of the newest vote."""
        return self._agreed

    def ask(self, what: Ask) -> None:
        """Bring `what` into the next vote."""
        with self._lock:
            self._asked |= what

    def brought(self) -> Ask:
        """What this rank brings to the vote that begins."""
        with self._lock:
            return self._asked

    def agree(self, brought: Ask) -> None:
        """The vote is complete, and its members brought `brought` together."""
        with self._lock:
            self._agreed = brought
            self._asked &= ~brought

    def clear(self) -> None:
        """A new generation begins: what an older one was asked for is void."""
        with self._lock:
            self._asked = self._agreed = Ask.NOTHING


Duty = Callable[[int, Ask], Awaitable[None]]
"""Called with the version that all ranks hold now and with what they agreed on."""


class Boundary:
    """The end of every iteration of one generation on one rank."""

    def __init__(
        self,
        agreement: Agreement,
        duties: Sequence[Duty] = (),
        endings: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`duties` are done in this order, on every rank after the same step.

        `endings` are waited for before the rank says that it finished the job.
        """
        self._agreement = agreement
        self._duties = duties
        self._endings = endings

    async def cross(self, version: int) -> bool:
        """Do what is due at `version`; whether the generation ends here. Raises as duties do."""
        agreed = self._agreement.agreed
        for duty in self._duties:
            await duty(version, agreed)
        return Ask.YIELD in agreed

    async def finish(self) -> None:
        """The last step of the job is done: wait for what goes on beside it."""
        for ending in self._endings:
            await ending()
