"""What a simulated executor holds, with the transaction around a step that the real one has.

Each keeps the history of (step, generation that ran it) of what it applied. That is its state: two
members with different histories would train different models.
"""

from __future__ import annotations

import msgspec
from coordinator_cases import record_of

from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.wire.messages import Deploy, Save, StepRecord

History = tuple[tuple[int, int], ...]
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
    """As `TrainState`, with the same demands."""

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

    def switch(self) -> None:
        """To the layout that is prepared."""
        assert self.pending is not None
        self.layout, self.holds = self.pending
        self.pending = None
        self.reduced = None

    def adopt(self, deploy: Deploy | Save) -> bool:
        """Go to the version that all were told to begin with, or save; whether that was forward."""
        commit = deploy.commit
        if self.pending is not None and self.pending[0] == deploy.base:
            self.switch()
        self.pending = None
        assert self.layout == deploy.base or not self.holds, "asked for a layout that is gone"
        is_behind = self.holds and self.version < commit.version
        if not self.holds:
            self.version = self.voted = commit.version
            self.updates, self.record = commit.updates, commit.record
        elif is_behind:
            assert self.version + 1 == commit.version, "asked to skip a step"
            assert self.reduced == self.version, "asked to roll forward without gradients"
            assert commit.record is not None
            self.vote(commit.record)
            self.apply()
        assert (self.version, self.voted) == (commit.version,) * 2, "asked to go back"
        assert self.updates == commit.updates, "a wrong count of updates"
        return is_behind

    def vote(self, record: StepRecord) -> None:
        assert record.step == self.version
        self.voted = record.step + 1
        self.record = record

    def apply(self) -> None:
        """The step of the vote that was seen last."""
        assert self.record is not None
        self.history = (*self.history, (self.record.step, self.record.num_tokens))
        assert loss_of(self.history) == self.record.loss, "a step on top of another history"
        self.updates += not self.record.skipped
        self.version += 1
