"""What a simulated executor holds, with the transaction around a step that the real one has.

Each keeps the history of (step, generation that ran it) of what it applied. That is its state: two
members with different histories would train different models.
"""

from __future__ import annotations

import msgspec
from coordinator_cases import record_of
from sim_memory import History, Key, Memory, Snapshot

from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.wire.messages import Commit, StepRecord

_PLANS: dict[str, Plan] = {}


def plan_of(text: str) -> Plan:
    if text not in _PLANS:
        _PLANS[text] = parse(text).plan
    return _PLANS[text]


def loss_of(history: History) -> float:
    """A record's loss stands for the whole history, so that a mixed one shows."""
    return float(hash(history) % 1_000_003)


def record_for(history: History, step: int, generation: int, *, skipped: bool) -> StepRecord:
    """Of the vote in which `generation`, which `num_tokens` tells, ran `step` after `history`."""
    loss = loss_of((*history, (step, generation)))
    return msgspec.structs.replace(record_of(step, loss, skipped=skipped), num_tokens=generation)


class SimState:
    """As `TrainState` with its `Snapshots`, with the same demands."""

    rank: int
    memory: Memory | None = None
    """Of its node; None: no snapshots."""
    layout: int = 0
    pending: tuple[int, bool] | None = None
    """Layout that is prepared, and whether it is a member there."""
    holds: bool = False
    """Whether it is a member of the generation whose layout it has."""
    version: int = 0
    voted: int = 0
    updates: int = 0
    history: History = ()
    reduced: int | None = None
    record: StepRecord | None = None
    newest: Key | None = None
    """The snapshot to go back to: its slot stays while the other is written."""
    writing: tuple[Key, Snapshot] | None = None

    def forget(self) -> None:
        """It was lost to the others, or all go back to a saved version."""
        self.layout, self.pending, self.holds, self.history = 0, None, False, ()
        self.reduced = None

    def switch(self) -> None:
        """To the layout that is prepared."""
        assert self.pending is not None
        self.layout, self.holds = self.pending
        self.pending = None
        self.reduced = None

    def adopt(self, base: int, commit: Commit) -> bool:
        """Go to the version that all were told to begin with; whether that was forward."""
        if self.pending is not None and self.pending[0] == base:
            self.switch()
        self.pending = None
        self.settle_snapshots(base, commit.version)
        own = self.memory.of(self.rank).get((base, commit.version)) if self.memory else None
        if not self.holds and own is not None:
            self.layout, self.holds, self.history = base, True, own.history
            self.take_numbers(commit)
        assert self.layout == base or not self.holds, "asked for a layout that is gone"
        is_safe = self.memory is not None or not self.holds or self.voted <= commit.version
        assert is_safe, "a vote was taken back"
        is_behind = self.holds and self.version < commit.version
        if not self.holds or (self.version == commit.version < self.voted):
            self.take_numbers(commit)
        elif self.version > commit.version:
            assert own is not None, "asked to go back"
            self.history = own.history
            self.take_numbers(commit)
        elif is_behind:
            assert self.version + 1 == commit.version, "asked to skip a step"
            assert self.reduced == self.version, "asked to roll forward without gradients"
            assert commit.record is not None
            self.vote(commit.record)
            self.apply()
        assert (self.version, self.voted) == (commit.version,) * 2, "not where it was asked to go"
        assert self.updates == commit.updates, "a wrong count of updates"
        return is_behind

    def take_numbers(self, commit: Commit) -> None:
        self.version = self.voted = commit.version
        self.updates, self.record = commit.updates, commit.record
        self.reduced = None

    def vote(self, record: StepRecord) -> None:
        assert record.step == self.version
        self.voted = record.step + 1
        self.record = record

    def apply(self) -> None:
        """The step of the vote that was seen last."""
        self.finish_snapshot()
        assert self.record is not None
        self.history = (*self.history, (self.record.step, self.record.num_tokens))
        assert loss_of(self.history) == self.record.loss, "a step on top of another history"
        self.updates += not self.record.skipped
        self.version += 1
        if self.memory is not None and self.record.snapshot:
            self.begin_snapshot(self.layout)

    # --- snapshots

    def begin_snapshot(self, generation: int) -> None:
        """A thread copies what it has, in the layout of `generation`."""
        if self.memory is not None:
            self.finish_snapshot()
            self.memory.begin(self.rank, self.newest)
            self.writing = (generation, self.version), Snapshot(self.history, self.updates)

    def finish_snapshot(self) -> None:
        """Wait until what was begun is sealed."""
        writing, self.writing = self.writing, None
        if writing is not None:
            assert self.memory is not None
            self.memory.seal(self.rank, *writing)
            self.newest = writing[0]

    def settle_snapshots(self, base: int, version: int) -> None:
        """The newest that all may go back to is not written over."""
        self.finish_snapshot()
        mine = self.memory.of(self.rank) if self.memory is not None else {}
        usable = [seen for generation, seen in mine if generation == base and seen <= version]
        self.newest = (base, max(usable)) if usable else None

    def secure(self, generation: int) -> None:
        """Seal the layout that is prepared, before anybody counts on it."""
        if self.memory is not None:
            self.finish_snapshot()
            self.memory.reserve(self.rank, self.newest)
            self.begin_snapshot(generation)
            self.finish_snapshot()
