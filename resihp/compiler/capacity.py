"""Which groups of a plan need more memory than a device has, by the verifier's own account."""

from __future__ import annotations

from typing import NamedTuple

from resihp.compiler.facts import facts_of
from resihp.compiler.kinds import kinds_of
from resihp.compiler.sources import spell_layers
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.verify.memory import peaks_of

__all__ = ["Oversized", "oversized", "peak_bytes"]


class Oversized(NamedTuple):
    """A group whose members need `needed_bytes` each, more than the device's `capacity_bytes`."""

    group: Group
    needed_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        name, layers, tp = self.group.name, spell_layers(self.group), self.group.tp
        return (
            f"{name} (layers {layers}, TP {tp}) needs {_mib(self.needed_bytes)} on each rank and a "
            f"device has {_mib(self.capacity_bytes)}"
        )


def oversized(plan: Plan) -> list[Oversized]:
    """The groups of a lowered plan that do not fit; none where no capacity is given."""
    capacity = plan.memory_bytes
    if capacity is None:
        return []
    peaks = peak_bytes(plan)
    return [
        Oversized(group, peaks[group.name], capacity)
        for group in plan.groups
        if peaks[group.name] > capacity
    ]


def peak_bytes(plan: Plan) -> dict[GroupName, int]:
    """The most that each member of each group of a lowered plan needs at once."""
    # Replicas of a kind keep the same alive, so one of each is enough to look at.
    kinds = kinds_of(plan)
    facts = facts_of(plan)
    peaks = peaks_of(lanes_of(plan, {kind.first for kind in kinds}), facts)
    first_of = {replica: kind.first for kind in kinds for replica in kind.replicas}
    state = {name: sum(s.state_bytes for s in sizes) for name, sizes in facts.stages.items()}
    found: dict[GroupName, int] = {}
    for group in plan.groups:
        first = GroupName(first_of[group.replica], group.pp)
        # How many sums of gradients there are follows from the numbers of the micro-batches too.
        found[group.name] = peaks[first] - state[first] + state[group.name]
    return found


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))}MiB"
