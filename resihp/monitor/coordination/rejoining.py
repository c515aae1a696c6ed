"""Lost ranks that come back: started again, waited for, and given a place at a boundary.

    lost --Respawn--> starting --Ready--> returned --good for long enough--> yield --> member
             ^                                |
             +----------- dies again ---------+

A rank that is back beats and waits; the plan counts on it only after it has been good for as many
iterations as its past asks for (`compiler.adaptation.hysteresis`). Then everybody is asked to
yield at the next boundary, and the generation that follows has it, with state from its peers.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from resihp.compiler.adaptation import Patience, Trust
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.incident import listed
from resihp.monitor.last_words import how_it_ended
from resihp.monitor.layout_line import layout_line
from resihp.monitor.memory import Memory
from resihp.monitor.own_sleep import put_off
from resihp.monitor.planner import Planner, VerifiedPlan
from resihp.monitor.restarts import Restarts
from resihp.wire.messages import Close, ExecutorExited, Ready

__all__ = ["Growth", "Rejoining"]


class Growth(NamedTuple):
    """A larger plan, decided on while a smaller one runs."""

    ranks: frozenset[int]
    """Those that come back with it."""
    plan: VerifiedPlan
    why: str


class Rejoining:
    """Of the ranks that are not alive."""

    def __init__(self, core: Core, planner: Planner, restarts: Restarts) -> None:
        self._core = core
        self._planner = planner
        rejoin = core.job.rejoin
        self._restarts = restarts
        good = rejoin.good_iterations
        self._patience = Patience(good_iterations=good, most_iterations=max(1024, good))
        self._trust = Trust()
        self._starting_s: dict[int, float] = {}
        """Since when executors start that are not ready."""
        self._dead: set[int] = set()
        """Ranks whose supervisor is there and has no executor."""
        self._away_s: dict[int, float] = {}
        """Since when supervisors are gone that may be started again."""
        self._idle_s: dict[int, float] = {}
        """Since when supervisors beat of which nothing else is known."""
        self._given_up: set[int] = set()
        """Ranks that are not started any more, as was told."""
        self._perhaps_returned: set[int] = set()
        """Under the coordinator before; they say so again."""
        self._growth: Growth | None = None
        self._considered: tuple[frozenset[int], int] = frozenset(), 0
        """Returned ranks that growing was not worth it for, and when to ask again."""
        self._is_needed = False
        """Whether the newcomers were taken in because no plan was left without them."""
        self._left_s = 0.0
        self._stood_s: float | None = None
        """Between two steps the last time that the plan grew."""

    # --- taking over

    def remember(self, memory: Memory) -> None:
        """What ranks did under other coordinators counts under this one."""
        self._restarts.remember(memory.starts)
        self._trust = Trust(memory.trust)
        self._given_up.update(memory.given_up)
        self._starting_s = dict.fromkeys(memory.starting, self._core.now_s)
        self._perhaps_returned.update(memory.returned)

    def resumed(self) -> None:
        """Which ranks are lost is known: what is remembered of the others is over."""
        core = self._core
        self._perhaps_returned.intersection_update(core.lost)
        starting = self._starting_s.keys() & core.lost
        self._starting_s = dict.fromkeys(starting, core.now_s)

    # --- away

    def distrust(self) -> None:
        """Somebody is lost: it must prove itself again, however soon it is back."""
        self._see(len(self._core.records))

    def _see(self, iteration: int) -> None:
        core, before = self._core, self._trust.records
        away = set(core.lost) - core.returned - self._perhaps_returned
        self._trust = self._trust.seen(iteration, away, self._patience)
        for rank in sorted(before.keys() | self._trust.records.keys()):
            record = self._trust.records.get(rank)
            if record is None:
                core.log("forgiven", rank=rank)
            elif record != before.get(rank):
                core.log("trust", rank=rank, relapses=record.relapses, good_since=record.good_since)

    def lost(self, rank: int) -> None:
        """The executor of a rank died, and its supervisor can start another one."""
        core = self._core
        self._forget(rank)
        self._dead.add(rank)
        self.distrust()
        if self._restarts.plan(rank, core.now_s):
            self._respawn()
        elif core.job.rejoin.restarts and rank not in self._given_up:
            self._given_up.add(rank)
            many = self._restarts.in_vain(rank)
            core.log("given_up", rank=rank, starts=many)
            core.say(f"rank {rank} is not started again: {many} starts without a step of its own")

    def gone(self, rank: int) -> None:
        """Its supervisor is gone too: nobody is there who could start it, but one may come."""
        self._forget(rank)
        if self._core.job.rejoin.restarts:
            self._away_s[rank] = self._core.now_s
        self.distrust()
        self._restarts.forget(rank)

    def waits(self, rank: int) -> None:
        """Its supervisor, a new one, has no executor and waits to be told."""
        if not self._is_known(rank):
            self.lost(rank)

    def beat(self, rank: int) -> None:
        """Its supervisor is there. Of one that says no more, say to a new coordinator, we are told
        nothing: it is started as if it had just been lost."""
        if self._is_known(rank):
            return
        now_s = self._core.now_s
        if now_s - self._idle_s.setdefault(rank, now_s) > self._core.timing.silent_s:
            self.lost(rank)

    def is_dead(self, rank: int) -> bool:
        """Whether the end of its executor was seen, and no start since."""
        return rank in self._dead

    def standings(self) -> dict[int, str]:
        """What becomes of each lost rank, for an operator."""
        return {rank: self._standing(rank) for rank in sorted(set(self._core.lost))}

    def _standing(self, rank: int) -> str:
        core = self._core
        if rank in core.returned:
            left = self._trust.wait(rank, len(core.records) - 1, self._patience)
            if left:
                more = _many(left, "iteration")
                return f"is back, and waits to be trusted: {more} more without a loss"
            return "is back, and waits for a plan that is better with it"
        if rank in self._starting_s:
            return f"lost; its executor starts, for {core.now_s - self._starting_s[rank]:.1f} s"
        if rank in self._restarts.planned:
            return "lost; its executor will be started again"
        if rank not in self._dead:
            return "lost, and its supervisor with it"
        if not core.job.rejoin.restarts:
            return "lost; not started again ([rejoin] restarts = 0)"
        many = _many(self._restarts.in_vain(rank), "start")
        return f"lost, and given up: {many} without a step of its own"

    @property
    def awaited(self) -> set[int]:
        """Ranks whose executor starts, or will, or whose supervisor has only just gone."""
        away_s, core = self._away_s, self._core
        may_come = {rank for rank in away_s if core.now_s - away_s[rank] <= core.timing.silent_s}
        return self._starting_s.keys() | self._restarts.planned | may_come

    def _is_known(self, rank: int) -> bool:
        return rank in self._dead or rank in self._starting_s or rank in self._core.returned

    def _forget(self, rank: int) -> None:
        self._core.returned.discard(rank)
        self._starting_s.pop(rank, None)
        self._away_s.pop(rank, None)
        self._idle_s.pop(rank, None)
        self._dead.discard(rank)
        self._perhaps_returned.discard(rank)
        self._core.round.fenced.pop(rank, None)  # that was for the executor before

    def _respawn(self) -> None:
        core = self._core
        for rank in self._restarts.due(core.now_s):
            self._starting_s[rank] = core.now_s
            core.log("respawn", rank=rank, start=self._restarts.in_vain(rank))
            core.send(rank, core.respawn(rank))

    def repeat(self, rank: int) -> None:
        """The order to start, where nothing has come of it."""
        if rank in self._starting_s and rank in self._dead:
            self._core.send(rank, self._core.respawn(rank))

    def tick(self) -> None:
        """Start whoever is due; a start that takes too long was in vain."""
        core = self._core
        self._respawn()
        for rank, since_s in list(self._starting_s.items()):
            if core.now_s - since_s > core.timing.start_s:
                core.log("not_ready", rank=rank, waited_s=core.now_s - since_s)
                self.lost(rank)  # a new start ends the one that hangs

    def stood_still(self, slept_s: float) -> None:
        """This process did, for `slept_s`: starts have so much longer."""
        put_off((self._starting_s, self._away_s, self._idle_s), slept_s, self._core.now_s)

    # --- back, but not yet counted on

    def started(self, rank: int) -> None:
        """An executor of a lost rank was started, by us or with a new supervisor."""
        core = self._core
        self._away_s.pop(rank, None)
        self._dead.discard(rank)
        if rank in self._starting_s:
            return
        self._starting_s[rank] = core.now_s
        is_allowed = self._restarts.started(rank)
        core.log("start_counted", rank=rank, start=self._restarts.in_vain(rank))
        if not is_allowed:
            core.send(rank, core.fence(rank, "its starts are used up"))

    def exited(self, rank: int, message: ExecutorExited) -> None:
        """The executor of a rank that is not counted on ended; said again, it counts once."""
        core = self._core
        if rank in self._dead:
            return
        core.book.forget(rank)
        if rank not in core.told_lost:
            how = how_it_ended(message)
            core.log("died_again", rank=rank, how=how, last_words=message.last_words)
        self.lost(rank)

    def ready(self, rank: int, message: Ready) -> None:
        """A lost rank can be deployed to."""
        core = self._core
        self._starting_s.pop(rank, None)
        digests = {core.ready[other].dataset_digest for other in core.alive if other in core.ready}
        if digests and message.dataset_digest not in digests:
            core.say(f"rank {rank} is not taken back: it reads different data")
            core.send(rank, core.fence(rank, "it reads different data"))
            return
        core.ready[rank] = message
        if rank in core.returned:
            return  # said again
        self._forget(rank)
        core.returned.add(rank)
        core.log("rank_returned", rank=rank, step=len(core.records))

    # --- counted on

    def committed(self) -> None:
        """A step is complete: whoever took part made progress, and the plan may grow."""
        core = self._core
        assert core.plan is not None
        proved = self._restarts.took_part(core.plan.plan.active_ranks)
        self._given_up.difference_update(proved)
        iteration = len(core.records) - 1
        if proved:
            core.log("took_part", ranks=sorted(proved), step=iteration)
        self._see(iteration)
        if core.phase is Phase.RUNNING and self._growth is None and core.returned:
            self._consider(iteration)

    def _consider(self, iteration: int) -> None:
        core = self._core
        left = core.job.job.steps - len(core.records)
        assert core.base_plan is not None
        trusted = frozenset(
            rank
            for rank in core.returned.intersection(core.base_plan.plan.lost)
            if not self._trust.wait(rank, iteration, self._patience)
        )
        asked, again = self._considered
        if not trusted or left < 1 or (trusted == asked and iteration < again):
            return
        growth = self._planner.after_return(
            core.base_plan,
            core.lost,
            trusted,
            trust=self._trust,
            patience=self._patience,
            iteration=iteration,
            left=left,
            switch_steps=self._switch_s() / (core.records[-1].duration_s or 1.0),
        )
        core.log("growth", ranks=sorted(trusted), grows=growth.plan is not None, why=growth.why)
        if growth.plan is None:
            self._considered = trusted, iteration + self._patience.good_iterations
            return
        self._growth = Growth(trusted, growth.plan, growth.why)
        core.ask_to_yield()

    def _switch_s(self) -> float:
        """How long a change of plans keeps everybody from working, as it was the last time."""
        if self._stood_s is not None:
            return self._stood_s
        recovered = [i.recovery_ms for i in self._core.book.incidents if i.recovery_ms is not None]
        return recovered[-1] / 1000 if recovered else self._patience.switch_s

    def left(self) -> None:
        """All agreed to yield: work stands still from here on."""
        self._left_s = self._core.now_s

    def interrupted(self) -> None:
        """The generation ended in another way: what was decided for its end is void.

        Ranks that were to come in with the next one hold nothing yet, and wait again: those that
        told this coordinator that they can be deployed to, the others once they have.
        """
        core = self._core
        self._growth = None
        for rank in core.newcomers:
            core.alive.discard(rank)
            core.lost.append(rank)
            if rank in core.ready:
                core.returned.add(rank)
        core.newcomers.clear()

    def admit(self) -> Growth | None:
        """At a boundary: the larger plan, whose ranks are alive from here on."""
        core, growth = self._core, self._growth
        self._growth = None
        if growth is None or not growth.ranks <= core.returned:
            return None
        self._admit(growth.ranks)
        return growth

    def take_in(self, ranks: AbstractSet[int]) -> None:
        """Returned `ranks` have a place in the plan that opens, since there is none without them.

        They hold nothing of the iteration that is redone.
        """
        self._admit(ranks)
        self._is_needed = True

    def _admit(self, ranks: AbstractSet[int]) -> None:
        core = self._core
        core.returned -= ranks
        core.lost[:] = [rank for rank in core.lost if rank not in ranks]
        core.alive |= ranks
        core.newcomers = set(ranks)
        self._is_needed = False
        # One that was cut off may be in its old generation still, and wait there.
        for rank in sorted(ranks):
            core.send(rank, Close(generation=core.generation))

    def joined(self) -> None:
        """The generation with the newcomers runs."""
        core = self._core
        if not core.newcomers:
            return
        assert core.plan is not None
        ranks = sorted(core.newcomers)
        core.newcomers.clear()
        if self._is_needed:
            core.log("rejoined", ranks=ranks, step=len(core.records))
            core.say(f"+ {listed(ranks)} back: no plan was left without")
            return
        self._stood_s = core.now_s - self._left_s
        stood_ms = 1000 * self._stood_s
        moved_bytes = sum(joined.moved_bytes for joined in core.round.joined.values())
        core.log(
            "rejoined",
            ranks=ranks,
            step=len(core.records),
            stood_ms=stood_ms,
            moved_bytes=moved_bytes,
        )
        core.say(
            f"+ {listed(ranks)} {'is' if len(ranks) == 1 else 'are'} back: "
            f"{layout_line(core.plan.plan)}; {stood_ms:.0f} ms between two steps, none redone"
        )


def _many(num: int, word: str) -> str:
    return f"{num} {word}{'' if num == 1 else 's'}"
