"""Which groups of a plan need more memory than a device has, by the verifier's own account."""

from __future__ import annotations

from typing import NamedTuple

from resihp.compiler.facts import facts_of
from resihp.compiler.sources import spell_layers
from resihp.ir.lanes import alike, lanes_of
from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.verify.memory import peaks_of

__all__ = ["Oversized", "oversized"]


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
    # Replicas that are alike have the same peaks, so one of each kind is enough to look at.
    kinds = alike(plan)
    lanes = lanes_of(plan, kinds)
    peaks = peaks_of(lanes, facts_of(plan))
    first_of = {replica: first for first, others in kinds.items() for replica in others}
    needed = {g.name: peaks[GroupName(first_of[g.replica], g.pp)] for g in plan.groups}
    return [
        Oversized(group, needed[group.name], capacity)
        for group in plan.groups
        if needed[group.name] > capacity
    ]


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))}MiB"
