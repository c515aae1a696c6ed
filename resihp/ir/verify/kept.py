"""Gradients that a plan keeps lie where the plan before made them, in groups that are the same."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.ir.kept import kept_by, same_groups, weights_run_at
from resihp.ir.model import GroupName, MicroBatch, Plan
from resihp.ir.placement import placement_of
from resihp.ir.source import Parsed
from resihp.ir.statements import spell_kept
from resihp.ir.verify.findings import Findings

__all__ = ["check_kept"]


def check_kept(parsed: Parsed, previous: Plan, findings: Findings) -> None:
    """RHP812."""
    plan = parsed.plan
    keep = sorted(kept_by(plan))
    if not keep or plan.resume is None:
        return
    again = plan.resume.step == (previous.resume.step if previous.resume is not None else None)
    before = kept_by(previous) if again else frozenset[MicroBatch]()
    same = same_groups(previous, plan)
    runs = weights_run_at(previous)
    gone: dict[tuple[int, GroupName | None], list[MicroBatch]] = {}
    for stage, pp in enumerate(placement_of(previous).pp):
        held = any(name.pp == pp for name in same)
        for each in keep:
            replica = runs[stage].get(each)
            if replica is None:
                if not (each in before and held):
                    gone.setdefault((stage, None), []).append(each)
            elif GroupName(replica, pp) not in same:
                gone.setdefault((stage, GroupName(replica, pp)), []).append(each)
    for (stage, name), lost in gone.items():
        _report(parsed, stage, name, lost, findings)


def _report(
    parsed: Parsed,
    stage: int,
    name: GroupName | None,
    lost: Sequence[MicroBatch],
    findings: Findings,
) -> None:
    span = parsed.attribute(parsed.statement("resume"), "keep")
    what = f"micro-batch {spell_kept(lost)} cannot be kept: at stage {stage} "
    if name is None:
        why = "nobody whose group stays the same computed it in the previous plan"
    else:
        why = f"it was computed by {name}, which has other ranks or layers here, or is gone"
    left = sorted(kept_by(parsed.plan).difference(lost))
    hint = f"write `keep={spell_kept(left)}`"
    findings.add("RHP812", span, what + why, hint=hint, detail=(stage, name))
