"""The simulated cluster finds what is broken on purpose: a rule at a time is taken out.

Without this nobody would know whether the schedules that pass show anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import pytest
import sim_nodes
from sim_faults import run_schedule

from resihp.monitor import settlement
from resihp.monitor.actions import Action
from resihp.monitor.coordination.core import Core, Round
from resihp.monitor.coordination.deciding import Deciding
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.repeating import Repeating
from resihp.monitor.coordination.resuming import Resuming
from resihp.monitor.coordination.reviving import Reviving
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.coordination.settling import Settling
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.quorum import campaign, leader, leadership
from resihp.monitor.quorum.acceptor import Answer, Kept, answer_propose
from resihp.wire.quorum import Accepted, Lead, Promise, Propose

MAX_SCHEDULES = 400
Patch = pytest.MonkeyPatch


def any_node_is_a_quorum(patch: Patch) -> None:
    def present(nodes: Collection[int], voters: Collection[int]) -> bool:
        return bool(set(nodes) & set(voters))

    for module in (campaign, leader, leadership):
        patch.setattr(module, "is_quorum", present)


def half_is_a_quorum(patch: Patch) -> None:
    def half(nodes: Collection[int], voters: Collection[int]) -> bool:
        return 2 * len(set(nodes) & set(voters)) >= len(voters)

    for module in (campaign, leader, leadership):
        patch.setattr(module, "is_quorum", half)


def promises_bind_nobody(patch: Patch) -> None:
    def lead(kept: Kept, message: Lead, *, is_led: bool) -> Answer:
        return Answer(
            msgspec.structs.replace(kept, promised=max(kept.promised, message.term)),
            Promise(term=message.term, entry=kept.entry, is_probe=message.is_probe),
        )

    def propose(kept: Kept, message: Propose) -> Answer:
        term = message.entry.term
        if term >= kept.promised:
            return answer_propose(kept, message)
        return Answer(kept, Accepted(term=term, generation=message.entry.generation))

    patch.setattr(sim_nodes, "answer_lead", lead)
    patch.setattr(sim_nodes, "answer_propose", propose)


def everything_is_adopted(patch: Patch) -> None:
    def decide(self: Resuming) -> None:
        self._adopt(waiting=set())

    patch.setattr(Resuming, "_decide", decide)


def nothing_found_is_taken_over(patch: Patch) -> None:
    init = leader.Leader.__init__

    def forget(
        self: leader.Leader, term: int, candidate: str, _: object, nodes: Collection[int]
    ) -> None:
        init(self, term, candidate, None, nodes)

    patch.setattr(leader.Leader, "__init__", forget)
    patch.setattr(leadership.Campaign, "newest", property(lambda _: None))


def plans_are_deployed_undecided(patch: Patch) -> None:
    propose = Deciding.propose

    def at_once(self: Deciding, *args: Any, **kwargs: Any) -> None:
        propose(self, *args, **kwargs)
        self.decided(self._core.generation)

    patch.setattr(Deciding, "propose", at_once)


def journals_are_lost(patch: Patch) -> None:
    start = sim_nodes.Node.start_monitor

    def forget(self: sim_nodes.Node) -> None:
        self.kept = Kept()
        start(self)

    patch.setattr(sim_nodes.Node, "start_monitor", forget)


def orders_to_kill_are_given_once(patch: Patch) -> None:
    reached = Repeating.reached

    def forget(self: Repeating, ranks: Collection[int]) -> None:
        fenced, self._core.round.fenced = self._core.round.fenced, {}
        reached(self, ranks)
        self._core.round.fenced = fenced

    patch.setattr(Repeating, "reached", forget)


def newcomers_stay_members(patch: Patch) -> None:
    def interrupted(self: Rejoining) -> None:
        self._growth = None

    patch.setattr(Rejoining, "interrupted", interrupted)


def who_missed_a_yield_is_not_told(patch: Patch) -> None:
    tick = Settling.tick

    def forget(self: Settling, waited_s: float) -> None:
        self._core.round.is_closed = True
        tick(self, waited_s)

    patch.setattr(Settling, "tick", forget)


def a_signal_that_comes_twice_ends_at_once(patch: Patch) -> None:
    stop = Coordinator.stop

    def at_once(self: Coordinator, reason: str, exit_code: int, now_s: float) -> list[Action]:
        if self._saving.ending is not None and self.phase is not Phase.STOPPING:
            self._core.stop(reason, exit_code)
        return stop(self, reason, exit_code, now_s)

    patch.setattr(Coordinator, "stop", at_once)


def late_reports_of_a_closed_generation_count(patch: Patch) -> None:
    patch.setattr(Core, "is_history", lambda *_: True)


def nobody_waits_for_restarts(patch: Patch) -> None:
    patch.setattr(Reviving, "wait", lambda *_: False)


def snapshots_of_any_version_count(patch: Patch) -> None:
    def any_of(self: Any, version: int, holders: Collection[int]) -> dict[int, tuple[int, ...]]:
        return {
            rank: tuple(sorted(readers))
            for (rank, _), readers in self._readers.items()
            if rank not in holders and rank in self._members
        }

    patch.setattr(settlement._Told, "snapshots", any_of)


def orders_to_save_are_given_once(patch: Patch) -> None:
    patch.setattr(Saving, "repeat", lambda *_: None)


def who_stood_still_leads_on(patch: Patch) -> None:
    patch.setattr(leadership.Leadership, "_look", lambda self, now_s: None)


def a_job_is_told_once_to_end(patch: Patch) -> None:
    terminate = sim_nodes.Node.terminate

    def forget(self: sim_nodes.Node) -> None:
        terminate(self)
        self.stop_asked = None

    patch.setattr(sim_nodes.Node, "terminate", forget)


def saves_meet(patch: Patch) -> None:
    def next_one(self: Membership, *, at_least: int = 0) -> None:
        core = self._core
        told = set(core.alive)
        self._rejoining.interrupted()
        core.generation = max(core.generation + 1, at_least - 1)
        core.round = Round(is_closed=True)
        core.enter(Phase.SETTLING)
        self.tell_to_leave(told)

    patch.setattr(Membership, "close", next_one)


MUTATIONS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    any_node_is_a_quorum: ("partitions", "nodes"),
    half_is_a_quorum: ("partitions", "nodes"),
    promises_bind_nobody: ("partitions", "nodes", "coordinators"),
    everything_is_adopted: ("control", "links"),
    nothing_found_is_taken_over: ("coordinators",),
    plans_are_deployed_undecided: ("nodes", "everything"),
    journals_are_lost: ("everything", "mixed"),
    orders_to_kill_are_given_once: ("mixed",),
    who_stood_still_leads_on: ("pauses",),
    a_job_is_told_once_to_end: ("terminated",),
    saves_meet: ("terminated",),
    newcomers_stay_members: ("returns", "returns_control"),
    who_missed_a_yield_is_not_told: ("returns", "returns_control"),
    a_signal_that_comes_twice_ends_at_once: ("saves_end",),
    late_reports_of_a_closed_generation_count: ("saves", "state"),
    orders_to_save_are_given_once: ("terminated",),
    nobody_waits_for_restarts: ("snapshots",),
    snapshots_of_any_version_count: ("snapshots", "snapshots_control"),
}


@pytest.mark.parametrize("mutation", list(MUTATIONS), ids=lambda mutation: mutation.__name__)
def test_a_rule_that_is_taken_out_is_missed(mutation: Callable[[Patch], None], monkeypatch: Patch):
    """Some schedule fails soon."""
    mutation(monkeypatch)
    families = MUTATIONS[mutation]
    for number in range(MAX_SCHEDULES):
        try:
            run_schedule(families[number % len(families)], number)
        except Exception as error:
            print(f"{mutation.__name__}: found by schedule {number}: {error}")
            return
    pytest.fail(f"no schedule of {MAX_SCHEDULES} found that {mutation.__name__}")
