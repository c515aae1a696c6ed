"""RHP905: replicas that run each other's micro-batches, a migration that cancels."""

from __future__ import annotations

from collections import defaultdict

from resihp.ir.diagnostics import Related
from resihp.ir.lanes import Lane
from resihp.ir.model import Op
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_exchange"]


def check_exchange(view: View, findings: Findings) -> None:
    """One finding per pair of replicas, at the first stage where they exchange."""
    away: dict[tuple[int, int, int], list[tuple[Lane, int]]] = defaultdict(list)
    """(stage, who runs them, their home) -> forwards of micro-batches that are not at home."""
    for lane in view.lanes.values():
        for (op, task), index in lane.first.items():
            if op is Op.F and task.home != lane.name.replica:
                away[task.stage, lane.name.replica, task.home].append((lane, index))
    for (stage, replica, home), here in sorted(away.items(), key=lambda entry: entry[0]):
        there = away.get((stage, home, replica), ())
        if replica < home and there:
            _report(view, stage, here, list(there), findings)


def _report(
    view: View,
    stage: int,
    here: list[tuple[Lane, int]],
    there: list[tuple[Lane, int]],
    findings: Findings,
) -> None:
    (lane, index), (other, at) = here[0], there[0]
    replicas = lane.name.replica, other.name.replica
    number = min(len(here), len(there))
    times = "" if number == 1 else f" ({number} times over)"
    findings.add(
        "RHP905",
        view.span(lane, index),
        f"replicas {replicas[0]} and {replicas[1]} run each other's micro-batches at stage "
        f"{stage}{times}: the migration cancels",
        related=(Related(f"{other.text(at)} of {other.name}", view.span(other, at)),),
        hint="let each run its own: the work stays the same and no activation changes replica",
        detail=replicas,
    )
