"""Entries for tests of elections, and many coordinators over some monitors in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

from resihp.monitor.quorum.acceptor import Kept, answer_lead, answer_propose
from resihp.monitor.quorum.campaign import Campaign, Standing
from resihp.monitor.quorum.leader import Leader
from resihp.wire.messages import Commit
from resihp.wire.quorum import Accepted, Entry, Lead, Promise, Propose, Superseded


def entry_of(
    term: int,
    generation: int,
    *,
    electors: Iterable[int] = (0, 1, 2),
    voters: Iterable[int] = (0, 1, 2),
    plan: str = "p",
) -> Entry:
    return Entry(
        term=term,
        generation=generation,
        electors=tuple(electors),
        voters=tuple(voters),
        plan=plan,
        base=0,
        base_plan="",
        commit=Commit(version=0, updates=0, record=None),
        alive=(0,),
        lost=(),
        cause="test",
    )


@dataclass
class Candidate:
    """One coordinator: it campaigns, then leads, until it dies."""

    name: str
    campaign: Campaign
    leader: Leader | None = None


class Shuffle:
    """Random events; messages may be lost, come twice, and in any order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.nodes = range(chance.randint(1, 5))
        self.kept = {node: Kept() for node in self.nodes}
        self.candidates: list[Candidate] = []
        self.up: list[tuple[int, int, Lead | Propose]] = []
        """(candidate, node, message) on the way to a monitor."""
        self.down: list[tuple[int, int, Promise | Accepted | Superseded]] = []
        self.decided: dict[int, str] = {}
        """Plan by generation."""
        self.newest = 0
        self.leads: dict[int, str] = {}
        """Who led in each term."""
        self._plans = itertools.count()

    def run(self, num_events: int) -> None:
        """AssertionError where two coordinators decide differently."""
        kinds = [self.appear, self.ask, self.propose, self.deliver, self.reply]
        for _ in range(num_events):
            self.chance.choices(kinds, weights=[1, 4, 2, 8, 8])[0]()

    def appear(self) -> None:
        """A coordinator asks for the lead; some older one may be dead by now, or a zombie."""
        promised = max(kept.promised for kept in self.kept.values())
        term = self.chance.randint(max(1, promised), promised + 2)
        name = f"c{len(self.candidates)}"
        self.candidates.append(Candidate(name, Campaign(term, self.nodes)))

    def ask(self) -> None:
        """Some coordinator asks a monitor (again) for what it wants."""
        if not self.candidates:
            return
        number = self.chance.randrange(len(self.candidates))
        candidate, node = self.candidates[number], self.chance.choice(self.nodes)
        proposal = candidate.leader.proposal if candidate.leader is not None else None
        message = proposal or Lead(term=candidate.campaign.term, candidate=candidate.name)
        self.up.append((number, node, message))

    def propose(self) -> None:
        """A leader wants the next generation, perhaps with other voters."""
        leaders = [each.leader for each in self.candidates if each.leader is not None]
        leaders = [leader for leader in leaders if leader.is_ready]
        if not leaders:
            return
        leader = self.chance.choice(leaders)
        generation = 1 if leader.proposed is None else leader.proposed.generation + 1
        voters = self.chance.sample(self.nodes, self.chance.randint(1, len(self.nodes)))
        plan = f"plan {next(self._plans)}"
        leader.propose(entry_of(leader.term, generation, voters=sorted(voters), plan=plan))

    def deliver(self) -> None:
        """A message reaches a monitor, or is lost; it may come once more."""
        if not self.up:
            return
        number, node, message = self.chance.choice(self.up)
        if self.chance.random() < 0.8:
            self.up.remove((number, node, message))
        if self.chance.random() < 0.1:
            return
        kept = self.kept[node]
        if isinstance(message, Lead):
            answer = answer_lead(kept, message, is_led=False)
        else:
            answer = answer_propose(kept, message)
        self.kept[node] = answer.kept
        self.down.append((number, node, answer.reply))

    def reply(self) -> None:
        """An answer reaches its coordinator."""
        if not self.down:
            return
        number, node, message = self.down.pop(self.chance.randrange(len(self.down)))
        candidate = self.candidates[number]
        if isinstance(message, Accepted):
            if candidate.leader is not None and candidate.leader.accepted(node, message):
                assert candidate.leader.decided is not None
                self.decide(candidate.leader.decided)
        elif candidate.leader is None:
            candidate.campaign.answer(node, message)
            if candidate.campaign.standing is Standing.WON:
                self.lead(candidate)

    def lead(self, candidate: Candidate) -> None:
        campaign = candidate.campaign
        assert self.leads.setdefault(campaign.term, candidate.name) == candidate.name
        candidate.leader = Leader(campaign.term, candidate.name, campaign.newest, self.nodes)

    def decide(self, entry: Entry) -> None:
        known = self.decided.setdefault(entry.generation, entry.plan)
        assert known == entry.plan, f"two plans of generation {entry.generation}"
        assert entry.generation >= self.newest, "decided on top of an older generation"
        self.newest = entry.generation
