"""What groups have room for, and which need more memory than a device has, as verified."""

from __future__ import annotations

from typing import NamedTuple

from resihp.compiler.facts import facts_of, stage_facts
from resihp.compiler.kinds import kinds_of
from resihp.compiler.planner.problem import Capacity
from resihp.compiler.sources import spell_layers
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Group, GroupName, LayerRange, Plan
from resihp.ir.verify.memory import peaks_of, readable_bytes

__all__ = ["NUM_BUFFERS", "Oversized", "oversized", "peak_bytes", "room_of"]

_UNBOUNDED = 1 << 60
"""Bytes of a device whose memory is not checked."""
NUM_BUFFERS = 4
"""Boundary tensors that a stage always has room for: sent and received, of F and of B."""


class Oversized(NamedTuple):
    """A group whose members need `needed_bytes` each, more than the device's `capacity_bytes`."""

    group: Group
    needed_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        name, layers, tp = self.group.name, spell_layers(self.group), self.group.tp
        needed, there = readable_bytes(self.needed_bytes), readable_bytes(self.capacity_bytes)
        if needed == there:
            needed, there = f"{self.needed_bytes:,} bytes", f"{self.capacity_bytes:,} bytes"
        who = f"{name} (layers {layers}, TP {tp})"
        return f"{who} needs {needed} on each rank and a device has {there}"


def room_of(plan: Plan, layers: LayerRange, tp: int, *, recomputes: bool = False) -> Capacity:
    """Of a member of a group of degree `tp` that holds `layers`; `free` may be negative.

    Sums of gradients are counted as for micro-batches that end in the order of their numbers, so
    a plan that moves some may need a little more.
    """
    num_partials = 1 + max(plan.batch.microbatches - 1, 0).bit_length()
    sizes = stage_facts(
        plan.model, plan.batch, layers, tp, num_partials, plan.precision, recomputes=recomputes
    )
    device = _UNBOUNDED if plan.memory_bytes is None else plan.memory_bytes
    return Capacity(
        free=device - sizes.state_bytes - NUM_BUFFERS * sizes.boundary_bytes,
        activation=sizes.activation_bytes,
        released=sizes.released_by_b_bytes,
        held=sizes.weight_input_grad_bytes,
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
