"""Who holds what: each rank in one place, each layer in one stage, each group with a stream."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings, listed

__all__ = ["check_topology"]


def check_topology(parsed: Parsed, findings: Findings) -> None:
    """RHP201 to RHP208."""
    _check_each_rank_once(parsed, findings)
    _check_tp_degrees(parsed, findings)
    _check_layers(parsed, findings)
    _check_streams(parsed, findings)
    _check_replicas(parsed, findings)


def _places(parsed: Parsed) -> Iterator[tuple[int, str, Span]]:
    """(rank, where it is, line of the text) of every mention of a rank."""
    plan = parsed.plan
    for span, group in zip(parsed.groups, plan.groups, strict=True):
        for rank in group.ranks:
            yield rank, f"in group {group.name}", span
    for rank in plan.standby:
        yield rank, "standby", parsed.statement("standby")
    for rank in plan.lost:
        yield rank, "lost", parsed.statement("lost")


def _check_each_rank_once(parsed: Parsed, findings: Findings) -> None:
    seen: dict[int, tuple[str, Span]] = {}
    for rank, where, span in _places(parsed):
        if rank in seen:
            before, first = seen[rank]
            again = "again" if (before, first) == (where, span) else f"and also {where}"
            findings.add(
                "RHP201",
                parsed.attribute(span, "ranks"),
                f"rank {rank} is {before} {again}",
                related=() if first == span else (Related(f"{before} here", first),),
                detail=rank,
            )
        seen.setdefault(rank, (where, span))
    missing = [rank for rank in range(parsed.plan.mesh.world) if rank not in seen]
    if missing:
        verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
        findings.add(
            "RHP202",
            parsed.statement("mesh"),
            f"rank {listed(missing)} of the mesh {verb} in no group, nor standby, nor lost",
            hint=f"add {pronoun} to a group, or to the `standby` or `lost` line",
        )


def _check_tp_degrees(parsed: Parsed, findings: Findings) -> None:
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        reason = _why_not_degree(parsed.plan, group.tp)
        if reason is not None:
            findings.add(
                "RHP203",
                parsed.attribute(span, "ranks"),
                f"group {group.name} has {group.tp} ranks, but a TP degree {reason}",
            )


def _why_not_degree(plan: Plan, degree: int) -> str | None:
    model = plan.model
    if degree & (degree - 1):
        return "must be a power of two"
    if degree > plan.mesh.tp:
        return f"cannot exceed the mesh's tp={plan.mesh.tp}"
    for what, number in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if number % degree:
            return f"must divide {what}={number}"
    return None


def _check_layers(parsed: Parsed, findings: Findings) -> None:
    """All groups of a stage agree, and the stages cover all layers in order."""
    stages: dict[int, tuple[Group, Span]] = {}
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        first, first_line = stages.setdefault(group.pp, (group, span))
        if first.layers != group.layers:
            findings.add(
                "RHP204",
                parsed.attribute(span, "layers"),
                f"{group.name} holds layers {group.sole_layers}, but {first.name} of the same "
                f"stage holds {first.sole_layers}",
                related=(Related(f"{first.name} is here", first_line),),
            )
    expected = 0
    for stage in sorted(stages):
        group, span = stages[stage]
        if group.sole_layers.first != expected:
            findings.add(
                "RHP205",
                parsed.attribute(span, "layers"),
                f"stage {stage} starts with layer {group.sole_layers.first}; layer {expected} "
                "comes next",
            )
        expected = group.sole_layers.last + 1
    num_layers = parsed.plan.model.layers
    if not stages:
        findings.add("RHP205", parsed.statement("mesh"), "the plan has no group")
    elif expected < num_layers:
        findings.add(
            "RHP205",
            parsed.attribute(stages[max(stages)][1], "layers"),
            f"the last stage ends with layer {expected - 1}; the model has layers "
            f"0..{num_layers - 1}",
            detail="end",
        )


def _check_streams(parsed: Parsed, findings: Findings) -> None:
    plan = parsed.plan
    with_stream = {
        GroupName(replica, stream.pp) for stream in plan.streams for replica in stream.replicas
    }
    with_group = {group.name for group in plan.groups}
    for span, group in zip(parsed.groups, plan.groups, strict=True):
        if group.name not in with_stream:
            findings.add("RHP206", span, f"group {group.name} has no stream")
    for stream, source in zip(plan.streams, parsed.streams, strict=True):
        for replica in stream.replicas:
            name = GroupName(replica, stream.pp)
            in_mesh = replica < plan.mesh.dp and stream.pp < plan.mesh.pp
            if in_mesh and name not in with_group:
                findings.add(
                    "RHP207",
                    source.head,
                    f"there is no group {name} to run this stream",
                    replica=replica,
                )


def _check_replicas(parsed: Parsed, findings: Findings) -> None:
    plan = parsed.plan
    stages: dict[int, set[int]] = {}
    first: dict[int, Span] = {}
    for span, group in zip(parsed.groups, plan.groups, strict=True):
        if group.replica < plan.mesh.dp:
            stages.setdefault(group.replica, set()).add(group.pp)
            first.setdefault(group.replica, span)
    for replica, held in stages.items():
        missing = [stage for stage in range(plan.mesh.pp) if stage not in held]
        if missing:
            findings.add(
                "RHP208",
                first[replica],
                f"replica {replica} has no group for stage {listed(missing)}",
                hint="give it one, or take the replica out and let others run its micro-batches",
            )
