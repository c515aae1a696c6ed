"""What an adaptation decided, what else it considered, and why; for programs and for people."""

from __future__ import annotations

import msgspec

from resihp.compiler.words import spell_seconds
from resihp.ir.model import Plan
from resihp.ir.statements import spell_numbers

__all__ = ["CANNOT_WIN", "PROMISES_LITTLE", "Considered", "Decision"]

CANNOT_WIN = "takes at least as long as what was chosen"
"""Why a candidate was not planned, or not to its end."""
PROMISES_LITTLE = "its first play took longer than the best, or it could save next to nothing"
"""The same where its bound alone does not prove it."""


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate."""

    name: str
    """What it changes: `TP`, `PP`, `DP` or several of them, and how."""
    num_groups_changed: int
    """Groups with other ranks or layers than before."""
    bound_s: float | None = None
    """No plan of the candidate can take less."""
    makespan_s: float | None = None
    """The planner's prediction, with the reduction of gradients; None where it was not played."""
    iteration_s: float | None = None
    """Simulated time of the verified plan; None where it was not lowered."""
    num_moved: int | None = None
    """Chunks (micro-batch, stage) that run away from home."""
    is_played: bool = False
    """Whether a play of it went on to its end."""
    why: str
    """Why it was chosen or not."""

    @property
    def is_pruned(self) -> bool:
        """Whether there is a bound alone: no plan of it can be shorter than what was chosen."""
        return self.why == CANNOT_WIN

    @property
    def line(self) -> str:
        """For the operator."""
        time_s = self.iteration_s or self.makespan_s or self.bound_s
        return f"  - {self.name}{'' if time_s is None else f' {spell_seconds(time_s)}'}: {self.why}"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, and how it was found."""

    plan: Plan
    text: str
    """The plan as it was verified."""
    chosen: str
    """Name of the candidate."""
    iteration_s: float
    """Simulated time of an iteration of the plan."""
    no_change_s: float | None
    """The same if nothing is changed; None where that cannot run."""
    moved_bytes: int
    """State that moves between ranks, or is read from a saved version, before the plan runs."""
    moved_s: float
    """Predicted seconds until it is there."""
    considered: tuple[Considered, ...]
    """All candidates, the most promising first."""
    num_played: int
    """How many plans were played."""

    def record(self) -> dict[str, object]:
        """All but the plan itself, whose text is in it, ready for JSON."""
        fields = (name for name in self.__struct_fields__ if name != "plan")
        return {name: msgspec.to_builtins(getattr(self, name)) for name in fields}

    def summary(self) -> str:
        """A few lines for the operator."""
        gain = ""
        if self.no_change_s is not None and self.no_change_s > self.iteration_s:
            gain = f", {100 * (1 - self.iteration_s / self.no_change_s):.1f} % less than unchanged"
        elif self.no_change_s is None:
            gain = "; unchanged it cannot run"
        head = f"{self.chosen}: {spell_seconds(self.iteration_s)} an iteration{gain}"
        moved = None
        if self.moved_bytes:
            moved = (
                f"moves {self.moved_bytes / 1e9:.3g} GB of state in {spell_seconds(self.moved_s)}"
            )
        plan = self.plan
        parts = [
            moved,
            f"standby {spell_numbers(plan.standby)}" if plan.standby else None,
            f"lost {spell_numbers(plan.lost)}" if plan.lost else None,
        ]
        lines = [head, *(f"  {part}" for part in parts if part)]
        pruned = [each for each in self.considered if each.is_pruned]
        lines += [each.line for each in self.considered if not each.is_pruned]
        if pruned:
            least_s = min(each.bound_s for each in pruned if each.bound_s is not None)
            others = "1 other takes" if len(pruned) == 1 else f"{len(pruned)} others take"
            lines.append(f"  - {others} at least {spell_seconds(least_s)} and cannot win")
        return "\n".join(lines)
