"""The coordinator of a job together with its lead over all nodes. Pure.

What the coordinator decides goes through a quorum, what happens to nodes happens to their ranks,
and nothing is done by a coordinator that does not lead, or is in doubt whether it does. The server
around it has the sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from resihp.monitor.actions import Action, Decide, Send
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.quorum.leadership import Leadership
from resihp.monitor.quorum.outcomes import (
    Awake,
    Decided,
    Deposed,
    Followed,
    NodeLost,
    Outcome,
    ToNode,
    Won,
)
from resihp.wire.messages import Beat, Message, Resend, StepRecord, What
from resihp.wire.quorum import Accepted, Entry, Promise, Superseded

__all__ = ["Helm", "Order"]

Order = Action | ToNode | Deposed


class Helm:
    """Call it with what happens; carry out what it returns, in order, until `Deposed`."""

    def __init__(
        self,
        coordinator: Coordinator,
        leadership: Leadership,
        ranks_of: Mapping[int, Collection[int]],
        known_records: Callable[[Entry], Sequence[StepRecord]],
    ) -> None:
        """`known_records`: of the steps before an entry that the run's directory here has, asked
        for once."""
        self.coordinator = coordinator
        self.leadership = leadership
        self._ranks_of = ranks_of
        self._known_records = known_records
        self._stop_asked: tuple[str, int] | None = None
        """The job is to end as soon as we lead it: a monitor says so once on each connection."""
        self._wished: set[What] = set()
        """What operators want, since we were in doubt."""
        self._gone: dict[int, tuple[str, float | None]] = {}
        """Ranks that monitors called gone while we did not lead, with evidence and time: that,
        they say only once."""
        self._completed: list[tuple[str, str, Sequence[str]]] = []
        """What became of versions while we were in doubt."""
        self.was_over = False
        """The end was decided by a coordinator before; monitors believe that of anyone."""

    def look(self, now_s: float) -> list[Order]:
        """Before anything else that happens: whether this process stood still."""
        return self._carry(self.leadership.look(now_s), now_s)

    # --- connections to monitors

    def connected(self, node: int, now_s: float) -> list[Order]:
        """The monitor of `node` is reached, perhaps again."""
        return self._carry(self.leadership.connected(node, now_s), now_s)

    def disconnected(self, node: int, now_s: float) -> list[Order]:
        """The connection to it broke."""
        return self._carry(self.leadership.disconnected(node, now_s), now_s)

    def refused(self, node: int, now_s: float) -> list[Order]:
        """Nobody listens there."""
        return self._carry(self.leadership.refused(node, now_s), now_s)

    # --- what monitors say

    def answer(
        self, node: int, message: Promise | Superseded | Accepted, now_s: float
    ) -> list[Order]:
        """About the lead."""
        return self._carry(self.leadership.receive(node, message, now_s), now_s)

    def beat(self, node: int, number: int, beats: Mapping[int, Beat], now_s: float) -> list[Order]:
        """Beat `number` of a node, with the newest of its ranks."""
        orders = self._carry(self.leadership.beat(node, number, now_s), now_s)
        for rank, beat in beats.items():
            orders += self.from_rank(rank, beat, now_s)
        return orders

    def from_rank(self, rank: int, message: Message, now_s: float) -> list[Order]:
        """A message of a rank; one that comes while we do not lead is said again then."""
        orders = self.look(now_s)
        if not self.leadership.has_won:
            self._gone.pop(rank, None)
        if not self.leadership.leads:
            return orders
        return orders + self._perform(self.coordinator.receive(rank, message, now_s), now_s)

    def rank_gone(
        self,
        rank: int,
        now_s: float,
        evidence: str = "its supervisor is gone",
        seen_s: float | None = None,
    ) -> list[Order]:
        """The supervisor of a rank is gone, as its monitor saw at `seen_s`."""
        orders = self.look(now_s)
        if not self.leadership.leads:
            self._gone[rank] = evidence, seen_s
            return orders
        actions = self.coordinator.disconnected(rank, now_s, evidence, seen_s)
        return orders + self._perform(actions, now_s)

    # --- the rest

    def over(self, reason: str, exit_code: int, now_s: float) -> list[Order]:
        """A monitor says that the job has ended: so it has, whoever leads, and all are told."""
        self.was_over = True
        return self._perform(self.coordinator.over(reason, exit_code, now_s), now_s)

    def stop(self, reason: str, exit_code: int, now_s: float) -> list[Order]:
        """End the job, as soon as we lead it."""
        orders = self.look(now_s)
        if not self.leadership.leads:
            self._stop_asked = reason, exit_code
            return orders
        return orders + self._perform(self.coordinator.stop(reason, exit_code, now_s), now_s)

    def wish(self, what: What, now_s: float) -> list[Order]:
        """An operator wants `what` of all ranks, as soon as we lead."""
        orders = self.look(now_s)
        if not self.leadership.leads:
            self._wished.add(what)
            return orders
        return orders + self._perform(self.coordinator.wish(what, now_s), now_s)

    def completed(
        self, name: str, trouble: str, pruned: Sequence[str], now_s: float
    ) -> list[Order]:
        """What became of a version that was to be completed."""
        orders = self.look(now_s)
        if not self.leadership.leads:
            self._completed.append((name, trouble, pruned))
            return orders
        actions = self.coordinator.completed(name, trouble, pruned, now_s)
        return orders + self._perform(actions, now_s)

    def tick(self, now_s: float) -> list[Order]:
        """Time passes."""
        orders = self._carry(self.leadership.tick(now_s), now_s)
        if self.leadership.leads:
            orders += self._perform(self.coordinator.tick(now_s), now_s)
        return orders

    def _perform(self, actions: Sequence[Action], now_s: float) -> list[Order]:
        orders: list[Order] = []
        for action in actions:
            if isinstance(action, Decide):
                orders += self._carry(self.leadership.propose(action.entry), now_s)
            else:
                orders.append(action)
        return orders

    def _catch_up(self, now_s: float) -> list[Order]:
        """What was heard while we did not lead."""
        orders: list[Order] = []
        gone, self._gone = self._gone, {}
        for rank, (evidence, seen_s) in sorted(gone.items()):
            orders += self.rank_gone(rank, now_s, evidence, seen_s)
        completed, self._completed = self._completed, []
        for name, trouble, pruned in completed:
            orders += self.completed(name, trouble, pruned, now_s)
        wished, self._wished = self._wished, set()
        for what in sorted(wished):
            orders += self.wish(what, now_s)
        stop_asked, self._stop_asked = self._stop_asked, None
        if stop_asked is not None:
            orders += self.stop(*stop_asked, now_s)
        return orders

    def _carry(self, outcomes: Sequence[Outcome], now_s: float) -> list[Order]:
        orders: list[Order] = []
        for outcome in outcomes:
            match outcome:
                case ToNode() | Deposed():
                    orders.append(outcome)
                case Won(None):
                    ranks = range(self.coordinator.world)
                    orders += [Send(rank, Resend(from_step=0)) for rank in ranks]
                    orders += self._catch_up(now_s)
                case Won(newest):
                    assert newest is not None
                    records = self._known_records(newest)
                    orders += self._perform(self.coordinator.resume(newest, records, now_s), now_s)
                    orders += self._catch_up(now_s)
                case Awake(slept_s):
                    actions = self.coordinator.stood_still(slept_s, now_s)
                    orders += self._perform(actions, now_s) + self._catch_up(now_s)
                case Decided(entry):
                    orders += self._perform(
                        self.coordinator.decided(entry.generation, now_s), now_s
                    )
                case Followed(node):
                    ranks = self._ranks_of[node]
                    orders += self._perform(self.coordinator.reached(ranks, now_s), now_s)
                case NodeLost(node, evidence):
                    for rank in self._ranks_of[node]:
                        actions = self.coordinator.disconnected(rank, now_s, evidence)
                        orders += self._perform(actions, now_s)
        return orders
