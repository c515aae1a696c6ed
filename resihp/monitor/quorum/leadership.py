"""A coordinator among the monitors of all nodes: asks for the lead, has generations decided, and
sees which nodes are there. Pure: what happens to its connections goes in, what to do comes out.

    probing --quorum would--> asking --promises--> settling what it found --accepts--> leading
      ^  |                      |                                                        |
      +--+----------------------+ overtaken, or no quorum: a newer term       overtaken, or no
                                                                              quorum is heard
                                                                                         |
                                                                                 deposed v

A process that stood still takes what waited in its sockets for new. So one that leads is in doubt
then: it does nothing before a quorum has answered a question that it asked since.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resihp.monitor.own_sleep import OwnSleep
from resihp.monitor.quorum.campaign import Campaign, Standing
from resihp.monitor.quorum.leader import Leader
from resihp.monitor.quorum.majority import is_quorum
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
from resihp.wire.quorum import Accepted, Entry, Lead, Leads, Promise, Superseded
from resihp.wire.timing import Timing

__all__ = ["Leadership"]


MAX_REPEATS = 3
"""How often the entry that was found is proposed again before a newer term is tried."""


class Leadership:
    """Of one coordinator process."""

    def __init__(
        self,
        nodes: Collection[int],
        home: int,
        candidate: str,
        first_term: int,
        timing: Timing,
        now_s: float,
        *,
        nodes_return: bool = True,
    ) -> None:
        """`candidate` names this process on node `home`, which promised less than `first_term`.

        `nodes_return`: whether a node where nobody listens may come back.
        """
        self._nodes = frozenset(nodes)
        self._home = home
        self._candidate = candidate
        self._timing = timing
        self._campaign = Campaign(first_term, nodes, is_probe=True)
        self._asked_s = now_s
        self._sleep = OwnSleep(timing.lease_s, now_s)
        self._doubted_since_s: float | None = None
        """When this process was last known to run, while it is in doubt whether it leads."""
        self._woke_s = now_s
        self._number = 0
        """Of the questions for the lead since it last stood still; older answers are void."""
        self._leader: Leader | None = None
        self._nodes_return = nodes_return
        self._gone: set[int] = set()
        """Nodes where nobody listened when they were last tried."""
        self._connected: set[int] = set()
        self._following: set[int] = set()
        """Connected nodes whose monitor promised our term on this connection."""
        self._heard_s: dict[int, float] = {}
        self._lost: set[int] = set()
        self._num_repeats = 0
        """How often the entry found was proposed again."""
        self._has_won = False
        self._is_deposed = False
        self._out: list[Outcome] = []

    @property
    def term(self) -> int:
        """Under which it asks, or leads."""
        return self._campaign.term

    @property
    def leads(self) -> bool:
        """Whether it decides what happens; not while it is in doubt."""
        return self.has_won and self._doubted_since_s is None

    @property
    def has_won(self) -> bool:
        """Whether it decides what happens, or did before it stood still."""
        return self._has_won and not self._is_deposed

    @property
    def lost(self) -> frozenset[int]:
        """Nodes that were given up and did not come back."""
        return frozenset(self._lost)

    @property
    def is_hopeless(self) -> bool:
        """Whether all nodes that are left would promise the lead, and are no quorum, for good."""
        left = self._nodes - self._gone
        return (
            not self._nodes_return
            and self._leader is None
            and bool(self._gone)
            and left <= self._campaign.promised
            and self._campaign.standing is Standing.OPEN
        )

    # --- what happens to connections

    def look(self, now_s: float) -> list[Outcome]:
        """Before anything else that happens: whether this process stood still."""
        self._look(now_s)
        return self._take()

    def connected(self, node: int, now_s: float) -> list[Outcome]:
        """A connection to the monitor of `node` is there; everything begins anew on it."""
        self._look(now_s)
        self._connected.add(node)
        self._gone.discard(node)
        self._following.discard(node)
        self._ask(node)
        return self._take()

    def disconnected(self, node: int, now_s: float) -> list[Outcome]:
        """It broke: the monitor may come back."""
        self._look(now_s)
        self._connected.discard(node)
        self._following.discard(node)
        return self._take()

    def refused(self, node: int, now_s: float) -> list[Outcome]:
        """Nobody listens there: the owner of the node is gone, and all it held with it."""
        self._look(now_s)
        self._gone.add(node)
        if self.leads and (node in self._heard_s or self._is_running):
            self._lose(node, "its node is gone")
        return self._take()

    def receive(
        self, node: int, message: Promise | Superseded | Accepted, now_s: float
    ) -> list[Outcome]:
        """An answer of a monitor."""
        self._look(now_s)
        match message:
            case Promise() if (message.term, message.number) == (self.term, self._number):
                self._promised(node, message, now_s)
            case Superseded():
                self._superseded(node, message)
            case Accepted() if self._leader is not None and self._doubted_since_s is None:
                self._heard_s[node] = now_s
                if self._leader.accepted(node, message):
                    self._decided(now_s)
            case _:
                pass  # an answer to an older question of ours; to a proposal it comes again
        return self._take()

    def beat(self, node: int, number: int, now_s: float) -> list[Outcome]:
        """Beat `number` of a node; it is told that we lead, if a quorum hears us.

        One that came before what the node answered on this connection may be of any age.
        """
        self._look(now_s)
        if node in self._following:
            self._heard_s[node] = now_s
            if self.leads and self._has_quorum(now_s):
                self._out.append(ToNode(node, Leads(term=self.term, number=number)))
        return self._take()

    def propose(self, entry: Entry) -> list[Outcome]:
        """Have `entry` decided; term, electors and voters are filled in here."""
        assert self._leader is not None
        voters = tuple(sorted(self._nodes - self._lost))
        self._leader.propose(msgspec.structs.replace(entry, voters=voters))
        for node in sorted(self._following):
            self._send_proposal(node)
        return self._take()

    def tick(self, now_s: float) -> list[Outcome]:
        """Time passes."""
        self._look(now_s)
        self._sleep.tick(now_s)
        if self._is_deposed:
            return self._take()
        if self.is_hopeless:
            gone = ", ".join(map(str, sorted(self._gone)))
            self._depose(f"no quorum is left without node {gone}")
        elif self._leader is None:
            self._tick_campaign(now_s)
        else:
            if self._has_won:
                self._tick_lead(now_s)
            self._say_again(now_s)
        return self._take()

    # --- standing still

    def _look(self, now_s: float) -> None:
        slept_s = self._sleep.look(now_s)
        if not slept_s or self._is_deposed:
            return
        if not self._has_won:
            self._begin_again(now_s)
            return
        if self._doubted_since_s is None:
            self._doubted_since_s = now_s - slept_s
        self._woke_s = self._asked_s = now_s
        self._number += 1
        self._following.clear()
        for node in sorted(self._connected):
            self._ask(node)

    def _end_doubt(self, now_s: float) -> None:
        """Lead again, where a quorum has promised the lead since this process runs again.

        Everything begins anew on all connections, since what waited in them was not heard.
        """
        assert self._leader is not None
        assert self._doubted_since_s is not None
        if not is_quorum(self._following, self._leader.electors):
            return
        self._out.append(Awake(now_s - self._doubted_since_s))
        self._doubted_since_s = None
        self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._out += [Followed(node) for node in sorted(self._following)]

    # --- asking

    def _ask(self, node: int) -> None:
        lead = Lead(
            term=self.term,
            candidate=self._candidate,
            is_probe=self._campaign.is_probe,
            number=self._number,
        )
        self._out.append(ToNode(node, lead))

    def _begin_again(self, now_s: float) -> None:
        """Under a newer term; answers to what was asked before are void."""
        self._leader = None
        self._ask_all(Campaign(self._campaign.next_term, self._nodes, is_probe=True), now_s)

    def _ask_all(self, campaign: Campaign, now_s: float) -> None:
        self._campaign = campaign
        self._asked_s = now_s
        self._following.clear()
        for node in sorted(self._connected):
            self._ask(node)

    def _tick_campaign(self, now_s: float) -> None:
        """Try again where it was not won in a while; nodes at different times."""
        if now_s - self._asked_s >= self._timing.lease_s * (1 + self._home / len(self._nodes)):
            is_new = self._campaign.is_probe and self._campaign.standing is not Standing.BEATEN
            term = self.term if is_new else self._campaign.next_term
            self._ask_all(Campaign(term, self._nodes, is_probe=True), now_s)

    def _promised(self, node: int, message: Promise, now_s: float) -> None:
        if message.is_probe:
            self._campaign.answer(node, message)
            if self._campaign.is_probe and self._campaign.standing is Standing.WON:
                self._ask_all(Campaign(self.term, self._nodes), now_s)
            return
        self._heard_s[node] = now_s
        self._following.add(node)
        self._lost.discard(node)
        if self._leader is not None:
            self._send_proposal(node)
            if self.leads:
                self._out.append(Followed(node))
            elif self._doubted_since_s is not None:
                self._end_doubt(now_s)
            return
        self._campaign.answer(node, message)
        if self._campaign.standing is Standing.WON:
            self._lead()

    def _lead(self) -> None:
        newest = self._campaign.newest
        self._num_repeats = 0
        self._leader = Leader(self.term, self._candidate, newest, self._nodes)
        if newest is None:
            self._has_won = True
            self._out.append(Won(None))
            return
        for node in sorted(self._following):
            self._send_proposal(node)

    def _superseded(self, node: int, message: Superseded) -> None:
        if self._leader is None:
            self._campaign.answer(node, message)
            if node == self._home and message.is_led:
                self._depose("another coordinator leads")
        elif message.promised >= self.term:
            self._depose(f"node {node} follows another coordinator, of term {message.promised}")

    # --- leading

    @property
    def _is_running(self) -> bool:
        """Whether a generation was decided: then every node that belongs to it must be there."""
        return self._leader is not None and self._leader.decided is not None

    def _send_proposal(self, node: int) -> None:
        assert self._leader is not None
        proposal = self._leader.proposal
        if proposal is not None:
            self._out.append(ToNode(node, proposal))

    def _decided(self, now_s: float) -> None:
        assert self._leader is not None
        entry = self._leader.decided
        assert entry is not None
        if self._has_won:
            self._out.append(Decided(entry))
            return
        self._has_won = True
        # Who was not heard yet has from now on to be: its ranks may be there, or not.
        self._lost = set(self._nodes - set(entry.voters) - self._following)
        for node in entry.voters:
            self._heard_s.setdefault(node, now_s)
        self._out.append(Won(entry))

    def _has_quorum(self, now_s: float) -> bool:
        """Whether those who decide on the next generation were heard a moment ago."""
        assert self._leader is not None
        recent = {
            node
            for node, heard_s in self._heard_s.items()
            if now_s - heard_s <= self._timing.silent_s and node not in self._lost
        }
        return is_quorum(recent, self._leader.electors)

    def _tick_lead(self, now_s: float) -> None:
        if self._doubted_since_s is not None:
            if now_s - self._woke_s > self._timing.silent_s:
                slept_s = self._woke_s - self._doubted_since_s
                self._depose(f"it stood still for {slept_s:.1f} s, and no quorum of nodes answers")
            return
        if not self._has_quorum(now_s):
            self._depose("no quorum of nodes is heard")
            return
        for node, heard_s in sorted(self._heard_s.items()):
            if now_s - heard_s > self._timing.silent_s:
                self._lose(node, f"its node was silent for {now_s - heard_s:.1f} s")

    def _say_again(self, now_s: float) -> None:
        """What was not answered in a while: a monitor may not have been able to write it down.

        Where that goes on before the lead is won, try under a newer term.
        """
        if self._is_deposed or now_s - self._asked_s <= self._timing.lease_s:
            return
        self._num_repeats += not self._has_won
        if self._num_repeats > MAX_REPEATS:
            self._begin_again(now_s)
            return
        self._asked_s = now_s
        for node in sorted(self._connected - self._following):
            self._ask(node)
        assert self._leader is not None
        if self._leader.proposed is not self._leader.decided:
            for node in sorted(self._following):
                self._send_proposal(node)

    def _lose(self, node: int, evidence: str) -> None:
        if node not in self._lost:
            self._lost.add(node)
            self._heard_s.pop(node, None)
            self._following.discard(node)
            self._out.append(NodeLost(node, evidence))

    def _depose(self, why: str) -> None:
        if not self._is_deposed:
            self._is_deposed = True
            self._out.append(Deposed(why))

    def _take(self) -> list[Outcome]:
        out, self._out = self._out, []
        return out
