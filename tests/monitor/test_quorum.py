"""Elections among monitors: who may lead, what is decided, and what is never decided twice."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quorum_cases import Shuffle, entry_of

from resihp.errors import JournalDamaged
from resihp.monitor.quorum.acceptor import Kept, answer_lead, answer_propose, obeys
from resihp.monitor.quorum.campaign import Campaign, Standing
from resihp.monitor.quorum.journal import read_journal, write_journal
from resihp.monitor.quorum.leader import Leader
from resihp.monitor.quorum.majority import is_quorum
from resihp.wire.quorum import Accepted, Lead, Promise, Propose, Superseded

nodes = st.frozensets(st.integers(0, 9), min_size=1, max_size=8)


def promised_to(term: int, candidate: str = "a") -> Kept:
    return answer_lead(Kept(), Lead(term=term, candidate=candidate), is_led=False).kept


# --- quorums


@given(nodes)
def test_any_two_quorums_share_a_voter(voters: frozenset[int]):
    """So two coordinators can never decide behind each other's back."""
    sides = [
        set(side)
        for size in range(len(voters) + 1)
        for side in itertools.combinations(sorted(voters), size)
        if is_quorum(side, voters)
    ]
    assert all(a & b for a, b in itertools.combinations_with_replacement(sides, 2))


@given(nodes, st.data())
def test_of_two_sides_exactly_one_is_a_quorum(voters: frozenset[int], data: st.DataObject):
    """However the nodes are split, one side goes on, and strangers do not help the other."""
    side = data.draw(st.frozensets(st.sampled_from(sorted(voters))))
    strangers = {100, 101}
    assert is_quorum(side | strangers, voters) != is_quorum((voters - side) | strangers, voters)


def test_of_two_nodes_the_lowest_one_goes_on():
    """Which is why two nodes do not survive the loss of the first."""
    assert is_quorum({0}, (0, 1))
    assert not is_quorum({1}, (0, 1))


# --- the acceptor


def test_a_promise_shuts_out_older_terms():
    """Neither leads nor proposals of them are accepted, and their orders are not followed."""
    kept = promised_to(5)
    for term in (1, 4):
        answer = answer_lead(kept, Lead(term=term, candidate="b"), is_led=False)
        assert answer == (kept, Superseded(promised=5, is_led=False))
        assert answer_propose(kept, Propose(entry=entry_of(term, 9), candidate="b")).kept == kept
        assert not obeys(kept, term)
    assert obeys(kept, 5)


def test_one_term_is_promised_to_one_coordinator():
    """The same one may ask again, which it does when a connection broke."""
    kept = promised_to(5, "a")
    again = answer_lead(kept, Lead(term=5, candidate="a"), is_led=True)
    other = answer_lead(kept, Lead(term=5, candidate="b"), is_led=False)
    assert isinstance(again.reply, Promise)
    assert isinstance(other.reply, Superseded)


def test_a_probe_changes_nothing():
    """And is answered as the real question would be."""
    kept = promised_to(5)
    for term in (4, 5, 6):
        probe = Lead(term=term, candidate="b", is_probe=True)
        answer = answer_lead(kept, probe, is_led=False)
        real = answer_lead(kept, Lead(term=term, candidate="b"), is_led=False)
        assert answer.kept == kept
        assert type(answer.reply) is type(real.reply)


def test_nobody_takes_the_lead_from_a_coordinator_that_is_heard():
    """A node that is cut off on one side only would disturb all others with ever newer terms."""
    kept = promised_to(5)
    answer = answer_lead(kept, Lead(term=6, candidate="b"), is_led=True)
    assert answer == (kept, Superseded(promised=5, is_led=True))
    assert answer_lead(kept, Lead(term=6, candidate="b"), is_led=False).kept.promised == 6


def test_an_accepted_entry_is_told_with_the_next_promise():
    """The newest one; an older one that arrives late does not replace it."""
    kept = promised_to(1)
    for generation in (3, 4, 3):
        kept = answer_propose(kept, Propose(entry=entry_of(1, generation), candidate="a")).kept
    reply = answer_lead(kept, Lead(term=2, candidate="b"), is_led=False).reply
    assert reply == Promise(term=2, entry=entry_of(1, 4))


# --- campaigns and leaders


def test_a_campaign_needs_the_voters_of_what_it_finds():
    """A quorum of all nodes is not one of those who decide by now."""
    campaign = Campaign(7, range(5))
    found = entry_of(6, 3, electors=range(5), voters=(0, 1))
    for node in (2, 3, 4):
        campaign.answer(node, Promise(term=7, entry=found if node == 2 else None))
    assert campaign.standing is Standing.OPEN
    campaign.answer(1, Promise(term=7, entry=found))
    assert campaign.standing is Standing.OPEN
    campaign.answer(0, Promise(term=7, entry=None))
    assert campaign.standing is Standing.WON
    assert campaign.newest == found


def test_a_campaign_that_was_overtaken_is_lost():
    """It says which term to try next."""
    campaign = Campaign(3, range(3))
    campaign.answer(1, Superseded(promised=8, is_led=False))
    assert campaign.standing is Standing.BEATEN
    assert campaign.next_term == 9


def test_what_was_found_is_decided_again_before_anything_new():
    """Under the new term: the old one may have reached too few nodes."""
    found = entry_of(1, 4, electors=range(3), voters=range(3))
    leader = Leader(2, "b", found, range(3))
    assert not leader.is_ready
    assert leader.proposal == Propose(entry=msgspec.structs.replace(found, term=2), candidate="b")
    assert not leader.accepted(0, Accepted(term=2, generation=4))
    assert leader.accepted(2, Accepted(term=2, generation=4))
    assert leader.is_ready


def test_an_entry_that_is_given_up_is_never_decided():
    """A rank was lost while it was proposed: what accepts it now comes too late."""
    leader = Leader(1, "a", None, range(3))
    leader.propose(entry_of(1, 1, voters=(0, 1)))
    assert not leader.accepted(0, Accepted(term=1, generation=1))
    leader.propose(entry_of(1, 2, voters=(0,)))
    assert not leader.accepted(1, Accepted(term=1, generation=1))
    assert leader.electors == (0, 1, 2)
    assert not leader.accepted(0, Accepted(term=1, generation=2))
    assert leader.accepted(1, Accepted(term=1, generation=2))
    assert leader.electors == (0,)


@pytest.mark.parametrize("batch", range(4))
def test_one_plan_per_generation_and_one_history_of_them(batch: int):
    """Coordinators that come, go and compete over monitors that restart; voters change, too."""
    for seed in range(batch * 250, (batch + 1) * 250):
        Shuffle(random.Random(seed)).run(num_events=150)


# --- the journal


def test_the_journal_gives_back_what_was_promised(tmp_path: Path):
    """Also after it was replaced; and a node without one has promised nothing."""
    path = tmp_path / "journal"
    assert read_journal(path) == Kept()
    for term in (1, 2):
        kept = answer_propose(
            promised_to(term), Propose(entry=entry_of(term, 3), candidate="a")
        ).kept
        write_journal(path, kept)
        assert read_journal(path) == kept
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


def test_a_journal_that_was_written_is_missed(tmp_path: Path):
    """Before the first promise there is none, and that is no damage."""
    path = tmp_path / "journal"
    assert read_journal(path) == Kept()
    with pytest.raises(JournalDamaged, match="is gone"):
        read_journal(path, was_written=True)


def test_a_damaged_journal_is_refused(tmp_path: Path):
    """Any byte that is changed, cut off or added: its monitor may have promised more."""
    path = tmp_path / "journal"
    write_journal(path, promised_to(3))
    whole = path.read_bytes()
    damaged = [whole[:place] for place in range(len(whole))] + [whole + b"\0"]
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        damaged.append(bytes(changed))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(JournalDamaged):
            read_journal(path)
