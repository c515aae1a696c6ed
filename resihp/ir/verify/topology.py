"""Who holds what: each rank in one place, each layer in one stage, each group with a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import Group, GroupName, LayerRange, Plan
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings, listed

__all__ = ["check_topology", "why_not_degree"]


def check_topology(parsed: Parsed, findings: Findings) -> None:
    """RHP201 to RHP207."""
    _check_each_rank_once(parsed, findings)
    _check_tp_degrees(parsed, findings)
    _check_layers(parsed, findings)
    _check_streams(parsed, findings)


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
    plan = parsed.plan
    ranks = chain(plan.active_ranks, plan.standby, plan.lost)
    if sorted(ranks) == list(range(plan.mesh.world)):
        return
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
        reason = why_not_degree(parsed.plan, group.tp)
        if reason is not None:
            findings.add(
                "RHP203",
                parsed.attribute(span, "ranks"),
                f"group {group.name} has {group.tp} ranks, but a TP degree {reason}",
            )


def why_not_degree(plan: Plan, degree: int) -> str | None:
    """Why no group can have `degree` ranks; None if one can."""
    model = plan.model
    if degree & (degree - 1):
        return "must be a power of two"
    if degree > plan.mesh.tp:
        return f"cannot exceed the mesh's tp={plan.mesh.tp}"
    for what, number in (("heads", model.heads), ("ffn", model.ffn)):
        if number % degree:
            return f"must divide {what}={number}"
    # Where there are more members than KV heads, each head is copied to as many.
    if model.kv_heads % degree and degree % max(model.kv_heads, 1):
        return f"must divide kv_heads={model.kv_heads} or be a multiple of it"
    return None


def _check_layers(parsed: Parsed, findings: Findings) -> None:
    """All groups of a position agree, and the stages cover all layers, each once."""
    positions: dict[int, tuple[Group, Span]] = {}
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        first, first_line = positions.setdefault(group.pp, (group, span))
        if first.layers != group.layers:
            findings.add(
                "RHP204",
                parsed.attribute(span, "layers"),
                f"{group.name} holds layers {_spell(group)}, but {first.name} at the same position "
                f"holds {_spell(first)}",
                related=(Related(f"{first.name} is here", first_line),),
            )
    stages = sorted((layers, span) for group, span in positions.values() for layers in group.layers)
    _check_ascending(parsed, positions, findings)
    _check_covered(parsed, stages, findings)


def _spell(group: Group) -> str:
    return ",".join(map(str, group.layers))


def _check_ascending(
    parsed: Parsed, positions: dict[int, tuple[Group, Span]], findings: Findings
) -> None:
    """RHP205 for a group whose stages are not in the order of their layers."""
    for group, span in positions.values():
        for before, after in pairwise(group.layers):
            if after < before:
                findings.add(
                    "RHP205",
                    parsed.attribute(span, "layers"),
                    f"the stages of {group.name} are not in order: {after} stands after {before}",
                    detail="order",
                )
                break


def _check_covered(
    parsed: Parsed, stages: list[tuple[LayerRange, Span]], findings: Findings
) -> None:
    """RHP205 for gaps and overlaps."""
    num_layers = parsed.plan.model.layers
    expected = 0
    for stage, (layers, span) in enumerate(stages):
        if layers.first != expected:
            findings.add(
                "RHP205",
                parsed.attribute(span, "layers"),
                f"stage {stage} starts with layer {layers.first}; layer {expected} comes next",
                detail=stage,
            )
        expected = layers.last + 1
    if not stages:
        findings.add("RHP205", parsed.statement("mesh"), "the plan has no group")
    elif expected < num_layers:
        findings.add(
            "RHP205",
            parsed.attribute(stages[-1][1], "layers"),
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
