"""What any session waits for from the coordinator, and what it says of itself until it runs."""

from __future__ import annotations

import asyncio

from resihp.errors import GenerationClosed
from resihp.executor.interpreter.run import Interpreter
from resihp.wire.address import Address
from resihp.wire.messages import At

__all__ = ["Joining"]


class Joining:
    """One rank's way into `generation`: the store's address and the word to go, in this order."""

    def __init__(self, generation: int, doing: str) -> None:
        loop = asyncio.get_running_loop()
        self.generation = generation
        self.doing = doing
        """In words, until it runs."""
        self.store: asyncio.Future[Address] = loop.create_future()
        self.go: asyncio.Future[None] = loop.create_future()
        self.is_broken = False
        """Something went wrong here: the rank waits for the generation to be closed."""

    def at(self, interpreter: Interpreter | None) -> At:
        """Where the rank is; how long it has been there is for the caller to say."""
        if interpreter is None:
            return At(generation=self.generation, runs=False, doing=self.doing)
        where = interpreter.where()._asdict()
        return At(generation=self.generation, runs=True, doing="runs", **where)

    def opened(self, address: Address) -> None:
        """The store listens at `address`; told twice, the first counts."""
        if not self.store.done():
            self.store.set_result(address)

    def went(self) -> None:
        """All have joined."""
        if not self.go.done():
            self.go.set_result(None)

    @property
    def runs(self) -> bool:
        """Whether it was told to go, and nothing broke since."""
        return self.go.done() and self.go.exception() is None and not self.is_broken

    def close(self) -> None:
        """Whoever waits here gets GenerationClosed."""
        for future in (self.store, self.go):
            if not future.done():
                future.set_exception(GenerationClosed("the generation is over"))
                future.exception()  # nobody may be waiting
