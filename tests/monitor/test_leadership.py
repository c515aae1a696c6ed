"""How a coordinator gets the lead and loses it, and how a monitor sees whether it has one."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from quorum_cases import entry_of

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
from resihp.monitor.quorum.watch import Watch
from resihp.wire.quorum import Accepted, Lead, Leads, Promise, Propose, Superseded
from resihp.wire.timing import Timing

TIMING = Timing.from_detect_within(1.0)


def asking(num_nodes: int = 3) -> Leadership:
    """On node 0; a quorum is willing."""
    lead = Leadership(range(num_nodes), 0, "a", 4, TIMING, 0.0)
    for node in range(num_nodes):
        lead.receive(node, Promise(term=4, entry=None, is_probe=True), 0.0)
    return lead


def leading(num_nodes: int = 3) -> Leadership:
    """Of term 4, followed by all nodes, generation 7 adopted."""
    lead = asking(num_nodes)
    found = entry_of(3, 7, electors=range(num_nodes), voters=range(num_nodes))
    for node in range(num_nodes):
        lead.connected(node, 0.0)
        lead.receive(node, Promise(term=4, entry=found), 0.0)
    for node in range(num_nodes):
        lead.receive(node, Accepted(term=4, generation=7), 0.0)
    assert lead.leads
    return lead


def messages(outcomes: list[Outcome], kind: type) -> list[int]:
    """Nodes that get a message of this kind."""
    return [
        each.node
        for each in outcomes
        if isinstance(each, ToNode) and isinstance(each.message, kind)
    ]


def probes(outcomes: list[Outcome]) -> list[bool]:
    """Of each question for the lead, whether it is one without consequences."""
    sent = [each.message for each in outcomes if isinstance(each, ToNode)]
    return [message.is_probe for message in sent if isinstance(message, Lead)]


def passes(
    lead: Leadership, since_s: float, until_s: float, beating: Collection[int] = ()
) -> list[Outcome]:
    """Time, with the beats of some nodes; what comes of it."""
    out: list[Outcome] = []
    now_s = since_s
    while now_s < until_s:
        now_s = min(now_s + TIMING.beat_s, until_s)
        for node in beating:
            out += lead.beat(node, 1, now_s)
        out += lead.tick(now_s)
    return out


# --- the coordinator


def test_with_no_entry_anywhere_the_job_begins():
    """As soon as a quorum promised."""
    lead = asking()
    assert messages(lead.connected(0, 0.0), Lead) == [0]
    assert not lead.receive(0, Promise(term=4, entry=None), 0.0)
    assert lead.receive(1, Promise(term=4, entry=None), 0.0) == [Won(None)]


def test_what_is_found_is_decided_first():
    """Under the new term; only then is it taken over."""
    lead = asking()
    found = entry_of(3, 7)
    lead.connected(0, 0.0)
    lead.receive(0, Promise(term=4, entry=None), 0.0)
    out = lead.receive(1, Promise(term=4, entry=found), 0.0)
    assert messages(out, Propose) == [0, 1]
    assert not lead.leads
    assert not lead.receive(0, Accepted(term=4, generation=7), 0.0)
    (won,) = lead.receive(1, Accepted(term=4, generation=7), 0.0)
    assert isinstance(won, Won)
    assert won.newest is not None
    assert won.newest.age == (4, 7)


def test_what_is_not_decided_is_proposed_again():
    """The disk of a monitor may have had no room; once it is decided nobody is asked any more."""
    lead = asking()
    for node in (0, 1):
        lead.connected(node, 0.0)
        lead.receive(node, Promise(term=4, entry=None), 0.0)
    assert messages(lead.propose(entry_of(0, 1)), Propose) == [0, 1]
    late_s = 1.5 * TIMING.lease_s
    assert messages(passes(lead, 0.0, late_s), Propose) == [0, 1]
    for node in (0, 1):
        lead.receive(node, Accepted(term=4, generation=1), late_s)
    assert not messages(passes(lead, late_s, 2 * late_s), Propose)


def test_what_is_found_is_proposed_again_and_at_last_under_a_newer_term():
    """The answers may be lost, or the disk that they wait for is."""
    lead = asking()
    for node in range(2):
        lead.connected(node, 0.0)
        lead.receive(node, Promise(term=4, entry=entry_of(3, 7)), 0.0)
    now_s, out, rounds = 0.0, list[Outcome](), list[list[int]]()
    for _ in range(4):
        assert not lead.tick(now_s + TIMING.lease_s / 2)
        now_s += 1.1 * TIMING.lease_s
        out = lead.tick(now_s)
        rounds.append(messages(out, Propose))
    assert rounds == [[0, 1], [0, 1], [0, 1], []]
    assert probes(out) == [True, True]
    assert lead.term == 5
    lead.receive(0, Accepted(term=4, generation=7), now_s)
    assert not lead.leads


def test_a_coordinator_that_is_overtaken_asks_with_a_newer_term():
    """After a while, so that two of them do not chase each other."""
    lead = asking()
    lead.connected(0, 0.0)
    lead.receive(0, Superseded(promised=9, is_led=False), 0.0)
    assert not lead.tick(TIMING.lease_s / 2)
    assert messages(lead.tick(1.2 * TIMING.lease_s), Lead) == [0]
    assert lead.term == 10


def test_a_coordinator_that_cannot_win_binds_nobody():
    """It first asks who would follow; only when a quorum would does it ask for promises."""
    lead = Leadership(range(3), 2, "a", 4, TIMING, 0.0)
    assert probes([each for node in range(3) for each in lead.connected(node, 0.0)]) == [True] * 3
    willing = Promise(term=4, entry=None, is_probe=True)
    assert not lead.receive(2, willing, 0.0)
    assert not lead.receive(0, Superseded(promised=3, is_led=True), 0.0)
    assert probes(lead.receive(1, willing, 0.0)) == [False] * 3


def test_a_coordinator_whose_own_node_is_led_ends():
    """It was started for a leader that is well again."""
    lead = Leadership(range(3), 2, "a", 4, TIMING, 0.0)
    (deposed,) = lead.receive(2, Superseded(promised=3, is_led=True), 0.0)
    assert isinstance(deposed, Deposed)


def test_an_entry_goes_to_all_who_follow_and_again_to_who_comes_back():
    """It is decided with a quorum, once."""
    lead = leading()
    assert messages(lead.propose(entry_of(0, 8)), Propose) == [0, 1, 2]
    lead.disconnected(1, 1.0)
    lead.connected(1, 1.0)
    out = lead.receive(1, Promise(term=4, entry=None), 1.0)
    assert messages(out, Propose) == [1]
    assert not lead.receive(0, Accepted(term=4, generation=8), 1.0)
    (decided,) = lead.receive(1, Accepted(term=4, generation=8), 1.0)
    assert isinstance(decided, Decided)
    assert decided.entry.voters == (0, 1, 2)
    assert not lead.receive(2, Accepted(term=4, generation=8), 1.0)


def test_a_node_is_lost_when_it_is_silent_or_nobody_listens_there():
    """The next generation is decided without its vote in the one after."""
    lead = leading()
    silent_s = TIMING.silent_s + TIMING.lease_s
    out = passes(lead, 0.0, silent_s, beating=(0, 1))
    assert [each.node for each in out if isinstance(each, NodeLost)] == [2]
    assert messages(out, Lead) == [2]  # should it come back
    lead.propose(entry_of(0, 8))
    lead.receive(0, Accepted(term=4, generation=8), silent_s)
    (decided,) = lead.receive(1, Accepted(term=4, generation=8), silent_s)
    assert isinstance(decided, Decided)
    assert (decided.entry.electors, decided.entry.voters) == ((0, 1, 2), (0, 1))
    assert lead.refused(1, silent_s) == [NodeLost(1, "its node is gone")]


@pytest.mark.parametrize("lost", [0.01, 0.1, 0.4])
def test_beats_that_are_lost_late_or_doubled_are_no_verdict(lost: float):
    """[T28] Below the limit nobody is lost, whatever the order; a burst above it is one verdict."""
    lead, watch = leading(), Watch(2, 3, TIMING, 0.0)
    chance = random.Random(0)
    late: list[int] = []
    burst_s = 100.0, 100.0 + 2 * TIMING.silent_s
    verdicts: list[float] = []
    now_s = 0.0
    while now_s < 200.0:
        now_s += TIMING.beat_s
        late.append(watch.beats(now_s))
        for node in (0, 1):
            lead.beat(node, 0, now_s)
        if not burst_s[0] < now_s < burst_s[1] and chance.random() > 0.3:
            chance.shuffle(late)
            for number in late * chance.choice([1, 2]):
                if chance.random() > lost:
                    for told in lead.beat(2, number, now_s):
                        assert isinstance(told, ToNode)
                        assert isinstance(told.message, Leads)
                        watch.heard(told.message, promised=4)
            late.clear()
        verdicts += [now_s for each in lead.tick(now_s) if isinstance(each, NodeLost)]
        assert verdicts or not watch.must_fence(now_s)
    assert len(verdicts) == 1
    assert burst_s[0] < verdicts[0] < burst_s[1]


def test_a_coordinator_without_a_quorum_gives_up():
    """And answers no beat before it does, so that nodes on its side know."""
    lead = leading()
    later_s = TIMING.silent_s + TIMING.beat_s / 2
    assert not passes(lead, 0.0, TIMING.silent_s)
    assert not messages(lead.beat(2, 1, later_s), Leads)
    (deposed,) = lead.tick(later_s)
    assert isinstance(deposed, Deposed)
    assert not lead.leads


# --- that stood still

SLEPT_S = 20 * TIMING.lease_s
PROPOSAL = entry_of(0, 8)


def asked(outcomes: list[Outcome]) -> dict[int, Lead]:
    """The questions for the lead, by node."""
    return {
        each.node: each.message
        for each in outcomes
        if isinstance(each, ToNode) and isinstance(each.message, Lead)
    }


def answer(question: Lead) -> Promise:
    return Promise(term=question.term, entry=None, number=question.number)


def test_who_stood_still_does_nothing_before_a_quorum_answers_what_it_asks_then():
    """Beats and answers that waited in its sockets are old; all that it must know comes again."""
    lead = leading()
    lead.propose(PROPOSAL)
    questions = asked(lead.beat(0, 9, SLEPT_S))
    assert questions.keys() == {0, 1, 2}
    assert not lead.leads
    for node in range(3):
        assert not lead.receive(node, Promise(term=4, entry=None), SLEPT_S)
        assert not lead.receive(node, Accepted(term=4, generation=8), SLEPT_S)
        assert not lead.beat(node, 10, SLEPT_S)
        assert not lead.refused(node, SLEPT_S)
    assert messages(lead.receive(1, answer(questions[1]), SLEPT_S), Propose) == [1]
    assert not lead.leads
    out = lead.receive(2, answer(questions[2]), SLEPT_S + 0.5)
    assert [each for each in out if not isinstance(each, ToNode)] == [
        Awake(SLEPT_S + 0.5),
        Followed(1),
        Followed(2),
    ]
    assert lead.leads
    assert messages(lead.beat(2, 11, SLEPT_S + 0.5), Leads) == [2]
    assert [type(each) for each in lead.receive(0, answer(questions[0]), SLEPT_S + 0.6)] == [
        ToNode,
        Followed,
    ]


def test_who_stood_still_blames_no_node_for_it():
    """From then on they have as long as ever to be heard."""
    lead = leading()
    questions = asked(lead.tick(SLEPT_S))
    for node in range(2):
        lead.receive(node, answer(questions[node]), SLEPT_S)
    out = passes(lead, SLEPT_S, SLEPT_S + TIMING.silent_s, beating=(0, 1))
    assert not [each for each in out if isinstance(each, NodeLost)]
    late_s = SLEPT_S + TIMING.silent_s
    out = passes(lead, late_s, late_s + TIMING.beat_s, beating=(0, 1))
    assert [each.node for each in out if isinstance(each, NodeLost)] == [2]


def test_who_stood_still_gives_up_where_no_quorum_answers_or_one_node_follows_another():
    """It asks again as ever."""
    lead = leading()
    questions = asked(lead.tick(SLEPT_S))
    lead.receive(2, answer(questions[2]), SLEPT_S)
    out = passes(lead, SLEPT_S, SLEPT_S + TIMING.silent_s + TIMING.beat_s)
    assert asked(out).keys() == {0, 1}
    (deposed,) = (each for each in out if isinstance(each, Deposed))
    assert f"it stood still for {SLEPT_S:.1f} s" in deposed.why
    other = leading()
    other.tick(SLEPT_S)
    (deposed,) = other.receive(1, Superseded(promised=6, is_led=True), SLEPT_S)
    assert isinstance(deposed, Deposed)


def test_who_stands_still_once_more_asks_once_more():
    """Answers to the first question are old by then."""
    lead = leading()
    first = asked(lead.tick(SLEPT_S))
    second = asked(lead.tick(2 * SLEPT_S))
    assert first.keys() == second.keys() == {0, 1, 2}
    for node in range(3):
        assert not lead.receive(node, answer(first[node]), 2 * SLEPT_S)
    lead.receive(0, answer(second[0]), 2 * SLEPT_S)
    out = lead.receive(1, answer(second[1]), 2 * SLEPT_S)
    assert Awake(2 * SLEPT_S) in out


def test_who_stands_still_on_its_way_to_the_lead_begins_again():
    """Under a newer term: what was promised before may have been promised to another since."""
    lead = asking()
    for node in range(3):
        lead.connected(node, 0.0)
    assert not lead.receive(0, Promise(term=4, entry=None), 0.0)
    out = lead.receive(1, Promise(term=4, entry=None), SLEPT_S)
    assert {(each.term, each.is_probe) for each in asked(out).values()} == {(5, True)}
    assert not lead.leads
    settles = asking()
    for node in range(2):
        settles.connected(node, 0.0)
        settles.receive(node, Promise(term=4, entry=entry_of(3, 7)), 0.0)
    settles.receive(0, Accepted(term=4, generation=7), 0.0)
    settles.receive(1, Accepted(term=4, generation=7), SLEPT_S)
    assert not settles.leads


# --- the end of hope


def test_nobody_asks_for_a_lead_that_nodes_that_are_gone_for_good_would_have_to_give():
    """Of two nodes the higher one is left: no quorum, ever; where nodes return, it asks again."""
    found = entry_of(3, 7, electors=range(2), voters=range(2))
    for nodes_return in (False, True):
        lead = Leadership(range(2), 1, "b", 4, TIMING, 0.0, nodes_return=nodes_return)
        lead.refused(0, 0.0)
        lead.connected(1, 0.0)
        assert not lead.is_hopeless, "node 1 may know that it is enough by itself"
        lead.receive(1, Promise(term=4, entry=found, is_probe=True), 0.0)
        assert lead.is_hopeless is not nodes_return
        assert [type(each) for each in lead.tick(0.1)] == ([] if nodes_return else [Deposed])


def test_a_quorum_that_is_left_hopes():
    """Of two nodes the lower one, or the higher one once a generation was decided without it."""
    for home, voters in ((0, range(2)), (1, range(1, 2))):
        lead = Leadership(range(2), home, "b", 4, TIMING, 0.0, nodes_return=False)
        lead.refused(1 - home, 0.0)
        lead.connected(home, 0.0)
        found = entry_of(3, 7, electors=voters, voters=voters)
        lead.receive(home, Promise(term=4, entry=found, is_probe=True), 0.0)
        assert not lead.is_hopeless
        assert not [each for each in lead.tick(0.1) if isinstance(each, Deposed)]


def test_a_coordinator_that_was_replaced_gives_up():
    """It was stopped for a while, and a monitor follows another one."""
    lead = leading()
    (deposed,) = lead.receive(1, Superseded(promised=5, is_led=False), 1.0)
    assert isinstance(deposed, Deposed)
    assert not lead.beat(1, 5, 1.0)


# --- the monitor


def test_a_beat_that_is_answered_counts_from_when_it_was_sent():
    """An answer that was long on its way proves nothing about now."""
    watch = Watch(0, 3, TIMING, 0.0)
    number = watch.beats(10.0)
    watch.heard(Leads(term=4, number=number), promised=4)
    assert watch.is_led(10.0 + TIMING.lease_s - 0.1)
    assert not watch.is_led(10.0 + TIMING.lease_s + 0.1)


def test_a_leader_of_another_term_is_no_leader():
    """It was replaced, and does not know yet."""
    watch = Watch(0, 3, TIMING, 0.0)
    watch.heard(Leads(term=3, number=watch.beats(10.0)), promised=4)
    assert not watch.is_led(10.0)


def test_nodes_want_a_leader_one_after_the_other():
    """At the start the first one at once; later all give the old one a chance."""
    for order in range(3):
        watch = Watch(order, 3, TIMING, 0.0)
        wait_s = order * TIMING.lease_s
        assert watch.wants_leader(wait_s)
        assert not order or not watch.wants_leader(wait_s - 0.1)
        watch.heard(Leads(term=1, number=watch.beats(20.0)), promised=1)
        watch.lost_connection()
        assert not watch.wants_leader(20.0 + wait_s + TIMING.lease_s - 0.1)
        assert watch.wants_leader(20.0 + wait_s + TIMING.lease_s)


def test_a_node_that_is_cut_off_fences_its_ranks_and_ends_later():
    """A single node cannot be cut off from others."""
    alone, among = Watch(0, 1, TIMING, 0.0), Watch(0, 3, TIMING, 0.0)
    assert among.must_fence(TIMING.fence_s)
    assert not among.must_fence(TIMING.fence_s - 1)
    assert among.is_alone(TIMING.alone_s)
    assert not alone.must_fence(1e6)
    assert not alone.is_alone(1e6)
