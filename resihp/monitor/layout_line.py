"""What is different in a plan from the healthy layout, in one line for the operator."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.model import Op, Plan
from resihp.ir.placement import placement_of

__all__ = ["layout_line"]


def layout_line(plan: Plan) -> str:
    """TP degrees, places without a group, shares of layers, moved micro-batches, standby ranks."""
    return ", ".join(_differences(plan)) or "the healthy layout"


def _differences(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    for group in plan.groups:
        if group.tp < mesh.tp:
            yield f"{group.name} TP {mesh.tp} -> {group.tp}"
    held = {group.name for group in plan.groups}
    for replica in range(mesh.dp):
        gone = [pp for pp in range(mesh.pp) if (replica, pp) not in held]
        if len(gone) == mesh.pp:
            yield f"dp{replica} dropped"
        else:
            yield from (f"dp{replica}.pp{pp} gone" for pp in gone)
    counts = [layers.last - layers.first + 1 for layers in placement_of(plan).layers]
    if max(counts) - min(counts) > 1:
        yield f"layers {'+'.join(map(str, counts))}"
    num_moved = _num_moved(plan)
    if num_moved:
        yield f"{num_moved} stage run{'' if num_moved == 1 else 's'} of micro-batches moved"
    if plan.standby:
        yield f"standby {', '.join(map(str, plan.standby))}"


def _num_moved(plan: Plan) -> int:
    """Forwards that run in another replica than their micro-batch's home."""
    return sum(
        instr.op is Op.F and instr.home not in (None, replica)
        for stream in plan.streams
        for replica in stream.replicas
        for instr in stream.body
    )
