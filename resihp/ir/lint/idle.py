"""RHP901: healthy ranks that do nothing, though the plan could use them."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import Group
from resihp.ir.statements import spell_numbers
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.topology import why_not_degree
from resihp.ir.view import View

__all__ = ["check_idle"]

_MOST_SHOWN = 4


def check_idle(view: View, findings: Findings) -> None:
    """Standby ranks that would double the TP degree of a group, and groups without compute."""
    _check_standby(view, findings)
    _check_groups(view, findings)


def _check_standby(view: View, findings: Findings) -> None:
    raisable = list(_raisable(view))
    if not raisable:
        return
    plan = view.plan
    shown = ", ".join(
        f"{group.name} (TP {group.tp} -> {2 * group.tp})" for _, group in raisable[:_MOST_SHOWN]
    )
    if len(raisable) > _MOST_SHOWN:
        shown += f" and {len(raisable) - _MOST_SHOWN} more"
    plural, verb = ("s", "are") if len(plan.standby) > 1 else ("", "is")
    findings.add(
        "RHP901",
        view.parsed.statement("standby"),
        f"rank{plural} {spell_numbers(plan.standby)} {verb} healthy and idle, but could raise the "
        f"TP degree of {shown}",
        related=tuple(
            Related(f"{group.name} has {group.tp} of the mesh's tp={plan.mesh.tp} ranks", span)
            for span, group in raisable[:_MOST_SHOWN]
        ),
        hint="give a group of TP degree d another d of these ranks, and them a source of state in "
        "`reconfigure`",
    )


def _raisable(view: View) -> Iterator[tuple[Span, Group]]:
    """Groups that could have twice their TP degree with the ranks that are standby."""
    plan = view.plan
    for span, group in zip(view.parsed.groups, plan.groups, strict=True):
        if group.tp <= len(plan.standby) and why_not_degree(plan, 2 * group.tp) is None:
            yield span, group


def _check_groups(view: View, findings: Findings) -> None:
    places = {
        group.name: span for span, group in zip(view.parsed.groups, view.plan.groups, strict=True)
    }
    for name, lane in view.lanes.items():
        if not any(instr.op.is_compute for instr in lane.body):
            findings.add(
                "RHP901",
                places[name],
                f"{name} computes nothing: its ranks {spell_numbers(lane.group.ranks)} only wait "
                "for the others",
                hint="let it run some of the micro-batches of its stages, or take it out of the "
                "plan and make its ranks standby",
                replica=name.replica,
            )
