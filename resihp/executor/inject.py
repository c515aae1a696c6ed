"""When injected faults strike this executor: places in its program, from the job or an operator.

What they do is in `resihp.executor.faults`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from resihp.config import Injection, Moment, lasting_kinds
from resihp.executor.faults import Conditions, Raise, fault_of
from resihp.executor.faults import Fault as Ready
from resihp.executor.stream import Event
from resihp.wire.messages import Fault, Message

__all__ = ["Injector", "Struck", "announcer", "place_of_hit"]

Struck = Mapping[int, int]
"""The last step that each injection struck in; it is over for this and earlier ones."""

_Announce = Callable[[Fault, Event], None]


def announcer(send: Callable[[Message], None]) -> _Announce:
    """Announces faults by `send`, on the running loop and from any thread."""
    loop = asyncio.get_running_loop()

    def announce(fault: Fault, sent: Event) -> None:
        def tell() -> None:
            send(fault)
            loop.call_soon(sent.set)  # a loop may write at the end of its turn

        loop.call_soon_threadsafe(tell)

    return announce


def place_of_hit(
    injection: Injection, number: int, *, rank: int, world: int, step: int, num_instrs: int
) -> int | None:
    """The instruction of `rank` that the fault strikes in iteration `step`; None: none.

    Random places depend on nothing but seed, number and step, so all ranks agree on them.
    """
    if injection.moment is not None:
        return None
    if injection.rate is None:
        if (injection.rank, injection.step) != (rank, step):
            return None
        place = injection.instruction
        return num_instrs // 2 if place is None else min(place, num_instrs - 1)
    draw = random.Random(f"{injection.seed}/{number}/{step}")
    strikes, place = draw.random() < injection.rate, draw.random()
    victim = draw.randrange(world) if injection.rank is None else injection.rank
    return int(place * num_instrs) if strikes and victim == rank else None


class _Armed(NamedTuple):
    """An injection of this rank."""

    number: int
    injection: Injection


class Injector:
    """Arms the injections of one rank.

    `announce(fault, sent)` must send the announcement and then set `sent`; the fault waits for
    that, so that its moment is known to the coordinator. It holds up the thread that it runs on
    until then, unless that is the one that announces (`is_on_loop`).
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        rank: int,
        announce: _Announce,
        *,
        world: int,
        struck: Struck | None = None,
        is_on_loop: bool = False,
    ) -> None:
        self._armed = [_Armed(number, each) for number, each in enumerate(injections)]
        self._rank = rank
        self._world = world
        self._announce = announce
        self._is_on_loop = is_on_loop
        self._struck = dict(struck or {})
        self._places: dict[int, list[_Armed]] = {}
        """Of the iteration that is queued, by instruction."""
        self.num_instrs = 0
        """Length of the rank's program; the default place of a fault is its middle."""
        self.conditions = Conditions()

    def order(self, injection: Injection) -> None:
        """An operator wants a fault: in the next iteration that begins, or at once if it lasts."""
        has_place = injection.instruction is not None or injection.moment is not None
        if injection.kind in lasting_kinds() and not has_place:
            fault_of(injection, self.conditions).strike()  # its supervisor announced it
        else:
            self._armed.append(_Armed(-1, injection))

    def before(self, step: int, index: int) -> Callable[[], None] | None:
        """The fault to run right before instruction `index` of iteration `step`.

        Asked for each instruction of an iteration, in order.
        """
        if index == 0:
            self._places = self._placed(step)
        here = self._places.get(index)
        if here is None:
            return None

        def strike() -> None:
            for armed in here:
                self._strike(armed, step, index)

        return strike

    def at(self, moment: Moment, step: int) -> Callable[[], None] | None:
        """Announce the fault of a moment of iteration `step`, and return what brings it about."""
        armed = self._of_moment(moment, step)
        if armed is None:
            return None
        fault, sent = self._begin(armed, step, -1)
        sent.wait()
        return fault.strike

    async def joining(self, moment: Moment, step: int) -> None:
        """Be struck while the rank joins the generation that redoes `step`; for the loop."""
        armed = self._of_moment(moment, step)
        if armed is not None:
            fault, sent = self._begin(armed, step, -1)
            await sent.wait_async()
            fault.strike()

    def _of_moment(self, moment: Moment, step: int) -> _Armed | None:
        for armed in self._armed:
            if armed.number < 0 and armed.injection.moment == moment:
                self._armed.remove(armed)
                return armed
            where = armed.injection.rank, armed.injection.step, armed.injection.moment
            if where == (self._rank, step, moment) and not self._is_over(armed, step):
                return armed
        return None

    def _is_over(self, armed: _Armed, step: int) -> bool:
        return step <= self._struck.get(armed.number, -1)

    def _placed(self, step: int) -> dict[int, list[_Armed]]:
        places: dict[int, list[_Armed]] = {}
        for armed in list(self._armed):
            injection = armed.injection
            if armed.number < 0 and injection.moment is None:
                self._armed.remove(armed)
                injection = msgspec.structs.replace(injection, rank=self._rank, step=step)
            elif armed.number >= 0 and self._is_over(armed, step):
                continue
            place = place_of_hit(
                injection,
                armed.number,
                rank=self._rank,
                world=self._world,
                step=step,
                num_instrs=self.num_instrs,
            )
            if place is not None:
                places.setdefault(place, []).append(armed)
        return places

    def _begin(self, armed: _Armed, step: int, index: int) -> tuple[Ready, Event]:
        """The fault, and when it has been announced."""
        number, injection = armed
        self._struck[number] = step
        sent = Event()
        self._announce(
            Fault(
                kind=injection.kind,
                step=step,
                instruction=index,
                at_s=time.monotonic(),
                number=number,
            ),
            sent,
        )
        return fault_of(injection, self.conditions), sent

    def _strike(self, armed: _Armed, step: int, index: int) -> None:
        fault, sent = self._begin(armed, step, index)
        if not self._is_on_loop:
            sent.wait()
            fault.strike()
        elif isinstance(fault, Raise):
            fault.strike()  # the item of the stream raises it, and the loop tells it later
        else:
            sent.when_done(lambda _: fault.strike())
