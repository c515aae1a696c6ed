"""The state of an emulated rank: steps count as in `resihp.executor.state`, nothing is held."""

from __future__ import annotations

from resihp.executor.boundary import Agreement
from resihp.wire.messages import Commit, HeldSums, Sealed, StepRecord

__all__ = ["EmulatedState"]


class EmulatedState:
    """The same transaction around a step and between generations, without tensors."""

    def __init__(self) -> None:
        self.agreement = Agreement()
        self.layout = 0
        self.holds_layers = False
        """Whether the rank has a place in generation `layout`."""
        self.version = 0
        self.updates = 0
        self.voted = 0
        self.record: StepRecord | None = None
        self._pending: tuple[int, bool] | None = None

    def report_held(self) -> tuple[int, int, tuple[HeldSums, ...]]:
        """Nothing: emulated devices compute no gradients."""
        return -1, self.layout, ()

    @property
    def layouts(self) -> tuple[int, ...]:
        """Generations whose layout this rank can continue from."""
        return (self.layout,) if self._pending is None else (self.layout, self._pending[0])

    def sealed(self) -> tuple[Sealed, ...]:
        """There is nothing to keep."""
        return ()

    def vote_complete(self, record: StepRecord) -> None:
        """All members contributed to the vote of `record.step`."""
        assert record.step == self.version
        self.voted = record.step + 1
        self.record = record

    def apply(self) -> None:
        """Complete the voted step."""
        assert self.voted == self.version + 1
        self.updates += 1
        self.version += 1

    def forget(self) -> None:
        """Hold nothing: this rank was lost to the others, who went on without it."""
        self.layout, self.holds_layers, self._pending = 0, False, None

    def adopt(self, base: int, commit: Commit) -> None:
        """Continue from the layout of generation `base`, at `commit.version`."""
        if self._pending is not None and self._pending[0] == base:
            self.layout, self.holds_layers = self._pending
        self._pending = None
        assert self.layout == base or not self.holds_layers, f"no layout of generation {base} here"
        if not self.holds_layers:
            self.version = self.voted = commit.version
            self.updates, self.record = commit.updates, commit.record
        elif self.version < commit.version:
            assert self.version + 1 == commit.version
            assert commit.record is not None
            if self.voted == self.version:
                self.vote_complete(commit.record)
            self.apply()
        settled = (commit.version, commit.version, commit.updates)
        assert (self.version, self.voted, self.updates) == settled

    def prepare(self, generation: int, *, holds_layers: bool) -> None:
        """The layout of `generation` is complete; it counts from `go` on."""
        self._pending = generation, holds_layers

    def go(self) -> None:
        """Use what was prepared."""
        assert self._pending is not None
        self.layout, self.holds_layers = self._pending
        self._pending = None
