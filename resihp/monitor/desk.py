"""Requests of operators, answered from what the coordinator knows and what ranks say when asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from resihp.config import JobConfig
from resihp.config.injection import is_of_a_rank
from resihp.errors import WireError
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.injecting import carrier, remark, why_not
from resihp.monitor.run_dir import RunDir
from resihp.wire.clock import Clock
from resihp.wire.messages import (
    AskWhere,
    At,
    Inject,
    KillRank,
    Message,
    Positions,
    Refused,
    Reply,
    What,
    Wish,
    decode,
)
from resihp.wire.timing import Timing

__all__ = ["Desk"]

CENSUS_S = 0.3
"""Beside a beat's period: how long `resihp where` waits for those that do not answer."""


class _Census:
    """Answers of ranks to one question."""

    def __init__(self, ranks: AbstractSet[int]) -> None:
        self.missing = set(ranks)
        self.answers: dict[int, At] = {}
        self.complete = asyncio.Event()
        if not self.missing:
            self.complete.set()

    def add(self, rank: int, answer: At) -> None:
        self.answers[rank] = answer
        self.missing.discard(rank)
        if not self.missing:
            self.complete.set()


class Desk:
    """Answers one request at a time or several; `leave` ends those that still wait."""

    def __init__(
        self,
        job: JobConfig,
        coordinator: Coordinator,
        run_dir: RunDir,
        clock: Clock,
        *,
        num_nodes: int,
        here: AbstractSet[int],
        send: Callable[[int, Message], None],
        wish: Callable[[What], None],
    ) -> None:
        """`here`: ranks whose supervisor can be reached; `send` reaches one.

        `wish` has the coordinator ask all ranks for something, and `answer` is called at last.
        """
        self._job = job
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._clock = clock
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._per_node = job.parallel.world // num_nodes
        self._here = here
        self._send = send
        self._wish = wish
        self._wishing: dict[What, list[Callable[[Message], None]]] = {}
        self._censuses: list[_Census] = []
        self._answering: set[asyncio.Task[None]] = set()

    def ask(self, payload: bytes, answer: Callable[[Message], None]) -> None:
        """A request of an operator; `answer` is called once."""
        task = asyncio.create_task(self._serve(payload, answer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def heard(self, rank: int, at: At) -> None:
        """A rank says where it is."""
        for census in self._censuses:
            census.add(rank, at)

    def answer(self, what: What, answer: Message) -> None:
        """What came of all wishes for `what`."""
        for tell in self._wishing.pop(what, []):
            tell(answer)

    async def leave(self) -> None:
        """Nobody is answered any more."""
        waiting = tuple(self._answering)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _serve(self, payload: bytes, answer: Callable[[Message], None]) -> None:
        try:
            request = decode(payload)
        except WireError as error:
            answer(Refused(text=str(error)))
            return
        match request:
            case KillRank():
                answer(self._kill(request.rank))
            case Inject():
                self._inject(request, answer)
            case AskWhere():
                answer(await self._positions())
            case Wish():
                self._wishing.setdefault(request.what, []).append(answer)
                self._wish(request.what)
            case _:
                answer(Refused(text=f"{type(request).__name__} is no request"))

    async def _positions(self) -> Positions:
        """Where the ranks are that answer within a moment."""
        census = _Census(self._coordinator.alive & self._here)
        self._censuses.append(census)
        try:
            for rank in tuple(census.missing):
                self._send(rank, AskWhere())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.beat_s + CENSUS_S):
                    await census.complete.wait()
        finally:
            self._censuses.remove(census)
        return self._coordinator.positions(census.answers, self._clock.now_s())

    def _kill(self, rank: int) -> Reply | Refused:
        refusal = self._untimely()
        if rank not in self._coordinator.alive & self._here:
            refusal = self._not_alive(rank)
        if refusal is not None:
            return Refused(text=refusal)
        self._coordinator.hit(rank, self._clock.now_s())
        self._send(rank, self._coordinator.fence(rank, "operator"))
        return Reply(text=f"rank {rank}: SIGKILL sent to its executor")

    def _inject(self, order: Inject, answer: Callable[[Message], None]) -> None:
        """Answer first: whoever would carry the answer may be about to die."""
        fault, kind = order.fault, order.fault.get("kind")
        alive = self._coordinator.alive
        rank = carrier(kind, order.rank, alive=alive, here=self._here, per_node=self._per_node)
        if rank is None:
            answer(Refused(text=self._not_alive(order.rank)))
            return
        plan = self._coordinator.steady_plan
        refusal = self._untimely() or why_not(fault, rank, self._job, plan)
        if refusal is not None:
            answer(Refused(text=refusal))
            return
        whose = f"rank {rank}: " if is_of_a_rank(kind) else ""
        answer(Reply(text=f"{whose}{kind} is on its way{remark(kind, self._job)}"))
        self._run_dir.event("inject", {"rank": rank, "fault": fault}, self._clock.now_s())
        self._send(rank, order)

    def _not_alive(self, rank: int | None) -> str:
        return f"rank {rank} is not alive; alive ranks: {sorted(self._coordinator.alive)}"

    def _untimely(self) -> str | None:
        """Why nothing can be done to anybody at the moment; None: it can."""
        if self._coordinator.phase is Phase.STARTING:
            return "the job has not begun yet"
        if self._coordinator.phase is Phase.STOPPING:
            return "the job is ending"
        return None
