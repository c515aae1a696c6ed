"""Numbers and names: ranks, replicas, stages, layers, micro-batches in range; nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import (
    GroupName,
    Instr,
    LayerRange,
    Load,
    Move,
    Plan,
    Reshard,
    Restore,
    Source,
    Stream,
)
from resihp.ir.placement import Placement
from resihp.ir.source import Parsed
from resihp.ir.statements import spell_instr, spell_numbers
from resihp.ir.verify.findings import Findings, listed

__all__ = [
    "MAX_INSTRUCTIONS",
    "MAX_WORLD",
    "check_bodies",
    "check_layers",
    "check_place",
    "check_ranges",
    "check_recompute",
    "check_sizes",
]

MAX_WORLD = 1 << 20
"""Largest mesh that is verified, in ranks."""
MAX_LAYERS = 1 << 16
MAX_INSTRUCTIONS = 1 << 25
"""Most instructions, counted once per replica, that are verified."""


def check_sizes(parsed: Parsed, findings: Findings) -> None:
    """RHP108, and RHP102 for streams that list more replicas than there are.

    Everything after this may rely on positive sizes and a bounded amount of work.
    """
    plan = parsed.plan
    for keyword, struct in (("model", plan.model), ("mesh", plan.mesh), ("batch", plan.batch)):
        line = parsed.statement(keyword)
        for key in struct.__struct_fields__:
            if getattr(struct, key) == 0:
                findings.add("RHP108", parsed.attribute(line, key), f"`{key}` must be at least 1")
    if findings.has("RHP1"):
        return
    model, mesh = plan.model, plan.mesh
    line = parsed.statement("model")
    if model.heads % model.kv_heads:
        findings.add(
            "RHP108",
            parsed.attribute(line, "kv_heads"),
            f"{model.heads} heads cannot share {model.kv_heads} KV heads evenly",
        )
    if model.hidden % model.heads:
        findings.add(
            "RHP108",
            parsed.attribute(line, "hidden"),
            f"a hidden size of {model.hidden} does not divide into {model.heads} heads",
        )
    if model.layers > MAX_LAYERS:
        findings.add(
            "RHP108",
            parsed.attribute(line, "layers"),
            f"the model has {model.layers} layers; at most {MAX_LAYERS} are verified",
        )
    if mesh.world > MAX_WORLD:
        findings.add(
            "RHP108",
            parsed.statement("mesh"),
            f"the mesh has {mesh.world} ranks; at most {MAX_WORLD} are verified",
        )
    elif sum(_ranges_of_positions(plan).values()) * mesh.dp > MAX_WORLD:
        findings.add(
            "RHP108",
            parsed.statement("mesh"),
            f"the groups hold more ranges of layers than {MAX_WORLD // mesh.dp}, the most that are "
            f"verified for {mesh.dp} replicas",
        )
    elif _num_instructions(plan) > MAX_INSTRUCTIONS:
        findings.add(
            "RHP108",
            parsed.statement("plan"),
            f"the streams hold more than {MAX_INSTRUCTIONS} instructions",
        )
    _check_stream_lengths(parsed, findings)


def _check_stream_lengths(parsed: Parsed, findings: Findings) -> None:
    num_replicas = parsed.plan.mesh.dp
    for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True):
        if len(stream.replicas) > num_replicas:
            findings.add(
                "RHP102",
                parsed.attribute(source.head, "dp"),
                f"the stream lists {len(stream.replicas)} replicas; the mesh has {num_replicas}",
            )


def _ranges_of_positions(plan: Plan) -> dict[int, int]:
    """Stages at each position, as the group there that has most of them says."""
    ranges: dict[int, int] = {}
    for group in plan.groups:
        ranges[group.pp] = max(ranges.get(group.pp, 0), len(group.layers))
    return ranges


def _num_instructions(plan: Plan) -> int:
    return sum(len(stream.replicas) * len(stream.body) for stream in plan.streams)


def check_ranges(parsed: Parsed, findings: Findings) -> None:
    """RHP101 to RHP107 and RHP112, outside of the streams' bodies."""
    _check_ranks(parsed, findings)
    _check_kept(parsed, findings)
    _check_groups(parsed, findings)
    _check_streams(parsed, findings)
    _check_sources(parsed, findings)


def _check_ranks(parsed: Parsed, findings: Findings) -> None:
    plan, world = parsed.plan, parsed.plan.mesh.world
    lists = [(span, group.ranks) for span, group in zip(parsed.groups, plan.groups, strict=True)]
    lists += [
        (parsed.statement(keyword), ranks)
        for keyword, ranks in (
            ("standby", plan.standby),
            ("lost", plan.lost),
            ("returned", plan.returned),
        )
    ]
    for span, ranks in lists:
        wrong = [rank for rank in ranks if rank >= world]
        if wrong:
            verb = "is" if len(wrong) == 1 else "are"
            findings.add(
                "RHP101",
                parsed.attribute(span, "ranks"),
                f"rank {listed(wrong)} {verb} not in the mesh, whose ranks are 0..{world - 1}",
            )


def _check_kept(parsed: Parsed, findings: Findings) -> None:
    """RHP104, RHP105 and RHP112 of the `resume` line."""
    plan = parsed.plan
    keep = () if plan.resume is None else plan.resume.keep
    if not keep:
        return
    span = parsed.attribute(parsed.statement("resume"), "keep")
    away = sorted({home for home, _ in keep if home >= plan.mesh.dp})
    if away:
        findings.add("RHP105", span, f"replica {listed(away)}: they are 0..{plan.mesh.dp - 1}")
    none = sorted({number for _, number in keep if number >= plan.batch.microbatches})
    if none:
        last = plan.batch.microbatches - 1
        findings.add("RHP104", span, f"micro-batch {listed(none)}: they are 0..{last}")
    twice = sorted(each for each, count in Counter(keep).items() if count > 1)
    if twice:
        findings.add("RHP112", span, f"micro-batch {twice[0]} is kept twice")


def check_place(parsed: Parsed, findings: Findings, span: Span, name: GroupName) -> None:
    """RHP102 for a group that is named at `span`."""
    mesh = parsed.plan.mesh
    if name.replica >= mesh.dp or name.pp >= mesh.pp:
        findings.add(
            "RHP102",
            span,
            f"{name} is outside the mesh: replicas are 0..{mesh.dp - 1}, positions "
            f"0..{mesh.pp - 1}",
        )


def check_layers(parsed: Parsed, findings: Findings, span: Span, layers: LayerRange) -> None:
    """RHP103 for layers that are named at `span`."""
    num_layers = parsed.plan.model.layers
    if layers.last >= num_layers:
        findings.add(
            "RHP103",
            parsed.attribute(span, "layers"),
            f"the model has layers 0..{num_layers - 1}, not {layers}",
            detail=layers,
        )


def _check_groups(parsed: Parsed, findings: Findings) -> None:
    seen: dict[GroupName, Span] = {}
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        check_place(parsed, findings, span, group.name)
        for layers in group.layers:
            check_layers(parsed, findings, span, layers)
        first = seen.setdefault(group.name, span)
        if first != span:
            findings.add(
                "RHP106",
                span,
                f"group {group.name} is defined twice",
                related=(Related("first here", first),),
            )


def _check_streams(parsed: Parsed, findings: Findings) -> None:
    seen: dict[GroupName, int] = {}
    plan = parsed.plan
    for index, stream in enumerate(plan.streams):
        head = parsed.streams[index].head
        listed_here: set[int] = set()
        for replica in stream.replicas:
            name = GroupName(replica, stream.pp)
            if replica >= plan.mesh.dp or stream.pp >= plan.mesh.pp:
                check_place(parsed, findings, head, name)
                break
            first = seen.setdefault(name, index)
            if first != index:
                findings.add(
                    "RHP107",
                    head,
                    f"the stream of {name} is defined twice",
                    related=(Related("first here", parsed.streams[first].head),),
                    replica=replica,
                )
            elif replica in listed_here:
                findings.add("RHP107", head, f"replica {replica} is listed twice")
            listed_here.add(replica)


def check_bodies(parsed: Parsed, placement: Placement, findings: Findings) -> None:
    """RHP102, RHP104, RHP105 and RHP109. Streams with the same text are looked at once."""
    suspects: dict[tuple[int, int], list[int]] = {}
    for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True):
        key = id(stream.body), stream.pp
        if key not in suspects:
            suspects[key] = list(_suspects(parsed.plan, placement, stream))
        for index in suspects[key]:
            instr, span = stream.body[index], source.span(index)
            _check_instr(parsed.plan, instr, span, findings)
            if _is_elsewhere(placement, stream.pp, instr):
                _report_stage(placement.stages[stream.pp], instr, span, findings)


def _suspects(plan: Plan, placement: Placement, stream: Stream) -> Iterator[int]:
    """Instructions with something out of range."""
    num_micro_batches, dp = plan.batch.microbatches, plan.mesh.dp
    for index, instr in enumerate(stream.body):
        if (
            (instr.microbatch or 0) >= num_micro_batches
            or (instr.home or 0) >= dp
            or (instr.peer or 0) >= dp
            or _is_elsewhere(placement, stream.pp, instr)
        ):
            yield index


def _check_instr(plan: Plan, instr: Instr, span: Span, findings: Findings) -> None:
    """RHP102, RHP104 and RHP105."""
    num_micro_batches, dp = plan.batch.microbatches, plan.mesh.dp
    if instr.microbatch is not None and instr.microbatch >= num_micro_batches:
        message = f"micro-batch {instr.microbatch} does not exist"
        findings.add("RHP104", span, f"{message}; they are 0..{num_micro_batches - 1}")
    if instr.home is not None and instr.home >= dp:
        message = f"replica {instr.home} does not exist"
        findings.add("RHP105", span, f"{message}; they are 0..{dp - 1}")
    if instr.peer is not None and instr.peer >= dp:
        message = f"dp{instr.peer} is outside the mesh: replicas are 0..{dp - 1}"
        findings.add("RHP102", span, message)


def _is_elsewhere(placement: Placement, pp: int, instr: Instr) -> bool:
    """Whether the instruction names no stage of a position that has some."""
    if not instr.op.has_stage or not placement.stages.get(pp):
        return False
    return placement.stage_of(pp, instr) is None


def _report_stage(held: tuple[int, ...], instr: Instr, span: Span, findings: Findings) -> None:
    """RHP109; `held` are the stages of the position."""
    here = f"stage {held[0]}" if len(held) == 1 else f"stages {listed(held)}"
    if instr.stage is None:
        stages = " or ".join(
            f"`{spell_instr(msgspec.structs.replace(instr, stage=stage))}`" for stage in held[:4]
        )
        findings.add(
            "RHP109",
            span,
            f"`{spell_instr(instr)}` does not say its stage; this stream runs {here}",
            hint=f"write {stages}",
        )
    else:
        findings.add(
            "RHP109",
            span,
            f"`{spell_instr(instr)}`: stage {instr.stage} is not here; this stream runs {here}",
        )


def check_recompute(parsed: Parsed, num_stages: int, findings: Findings) -> None:
    """RHP111, for a model of `num_stages` stages."""
    stages = parsed.plan.recompute
    if not stages:
        return
    line = parsed.statement("recompute")
    if max(stages) >= num_stages:
        there = f"they are 0..{num_stages - 1}"
        findings.add("RHP111", line, f"stage {max(stages)} does not exist; {there}")
    elif any(one >= other for one, other in pairwise(stages)):
        right = spell_numbers(sorted(set(stages)))
        findings.add(
            "RHP111",
            line,
            "the stages are not in ascending order, each once",
            hint=f"write `recompute {right}`",
        )


def _check_sources(parsed: Parsed, findings: Findings) -> None:
    """The lines of the reconfigure block."""
    world = parsed.plan.mesh.world
    for span, line in zip(parsed.reconfigure, parsed.plan.reconfigure, strict=True):
        check_layers(parsed, findings, span, line.layers)
        ranks, places = _ends(line)
        for rank in ranks:
            if rank >= world:
                message = f"rank {rank} is not in the mesh, whose ranks are 0..{world - 1}"
                findings.add("RHP101", span, message, detail=rank)
        for place in places:
            check_place(parsed, findings, span, place)


def _ends(line: Source) -> tuple[set[int], set[GroupName]]:
    """Ranks and groups that a line of the reconfigure block names."""
    match line:
        case Reshard():
            return set(), {line.source, line.target}
        case Move():
            return {line.source, line.target}, set()
        case Restore():
            return {line.source, line.giver}, {line.target}
        case Load():
            return set(), {line.target}
