"""Each micro-batch runs F and its backward exactly once at every stage, in order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import COMPUTE, Lane, MicroBatch, name_of
from resihp.ir.model import GroupName, Op
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings, listed

__all__ = ["At", "Work", "check_once"]


class At(NamedTuple):
    """An instruction of a lane."""

    lane: Lane
    position: int


class Work(NamedTuple):
    """Who computes what, and which of it is already reported as wrong."""

    places: dict[tuple[int, MicroBatch], dict[Op, At]]
    """Per (stage, micro-batch): the first instruction of each kind."""
    broken: set[tuple[int, MicroBatch]]


def check_once(parsed: Parsed, lanes: Mapping[GroupName, Lane], findings: Findings) -> Work:
    """RHP301 to RHP306. What is broken here is left alone by the data flow checks."""
    work = _collect(parsed, lanes, findings)
    for (stage, micro_batch), ops in work.places.items():
        if not _check_one(parsed, stage, micro_batch, ops, findings):
            work.broken.add((stage, micro_batch))
    _check_all_present(parsed, lanes, work, findings)
    return work


def _collect(parsed: Parsed, lanes: Mapping[GroupName, Lane], findings: Findings) -> Work:
    """The places of all compute instructions. Reports RHP302."""
    work = Work({}, set())
    for lane in lanes.values():
        twice = [(index, first) for index, first in lane.again if lane.body[index].op in COMPUTE]
        for index, first in twice:
            _report_twice(parsed, At(lane, index), At(lane, first), work, findings)
        for (op, micro_batch), index in lane.first.items():
            if op not in COMPUTE:
                continue
            ops = work.places.setdefault((lane.name.pp, micro_batch), {})
            first_at = ops.setdefault(op, At(lane, index))
            if first_at.lane is not lane:
                _report_twice(parsed, At(lane, index), first_at, work, findings)
    return work


def _span(parsed: Parsed, at: At) -> Span:
    return parsed.streams[at.lane.stream].span(at.position)


def _text(at: At) -> str:
    """`F 3` as it reads in the lane."""
    micro_batch = at.lane.micro_batches[at.position]
    assert micro_batch is not None
    return f"{at.lane.body[at.position].op.mnemonic} {name_of(micro_batch, at.lane.name.replica)}"


def _report_twice(parsed: Parsed, again: At, first: At, work: Work, findings: Findings) -> None:
    micro_batch = again.lane.micro_batches[again.position]
    assert micro_batch is not None
    work.broken.add((again.lane.name.pp, micro_batch))
    where = "" if first.lane is again.lane else f" of {first.lane.name}"
    findings.add(
        "RHP302",
        _span(parsed, again),
        f"`{_text(again)}` runs twice at stage {again.lane.name.pp}",
        related=(Related(f"`{_text(first)}`{where} is here", _span(parsed, first)),),
        replica=again.lane.name.replica,
    )


def _check_one(
    parsed: Parsed, stage: int, micro_batch: MicroBatch, ops: dict[Op, At], findings: Findings
) -> bool:
    """Whether one micro-batch runs once, whole and in order at `stage`."""
    forward = ops.get(Op.F)
    if forward is None:
        orphan = min(ops.values(), key=lambda at: at.position)
        findings.add(
            "RHP301",
            _span(parsed, orphan),
            f"`{_text(orphan)}` has no F: micro-batch {micro_batch.number} of replica "
            f"{micro_batch.home} never runs forward at stage {stage}",
            replica=orphan.lane.name.replica,
        )
        return False
    backward = [ops[op] for op in (Op.B, Op.W, Op.BW) if op in ops]
    if Op.BW in ops and len(backward) > 1:
        findings.add(
            "RHP304",
            _span(parsed, ops[Op.BW]),
            f"`{_text(ops[Op.BW])}` repeats what `{_text(backward[0])}` does",
            related=(Related(f"`{_text(backward[0])}` is here", _span(parsed, backward[0])),),
            hint="keep either BW, or B and W",
            replica=forward.lane.name.replica,
        )
        return False
    if Op.BW not in ops and len(backward) < 2:
        _report_no_backward(parsed, forward, ops, findings)
        return False
    away = [at for at in backward if at.lane is not forward.lane]
    for at in away:
        findings.add(
            "RHP306",
            _span(parsed, at),
            f"`{_text(at)}` runs on {at.lane.name}, but its forward ran on {forward.lane.name}",
            related=(Related(f"`{_text(forward)}` is here", _span(parsed, forward)),),
            replica=at.lane.name.replica,
        )
    return not away and _check_order(parsed, [forward, *backward], findings)


def _report_no_backward(parsed: Parsed, forward: At, ops: dict[Op, At], findings: Findings) -> None:
    number = _text(forward).removeprefix("F ")
    if Op.B in ops:
        missing = f"`W {number}`: its weight gradient is lost"
    elif Op.W in ops:
        missing = f"`B {number}`"
    else:
        missing = f"backward: neither `BW {number}` nor `B {number}` and `W {number}`"
    findings.add(
        "RHP303",
        _span(parsed, forward),
        f"`{_text(forward)}` has no {missing}",
        replica=forward.lane.name.replica,
    )


def _check_order(parsed: Parsed, in_order: list[At], findings: Findings) -> bool:
    """Whether F < B < W; the instructions are of one lane."""
    fine = True
    for before, after in pairwise(in_order):
        if before.position > after.position:
            fine = False
            findings.add(
                "RHP305",
                _span(parsed, after),
                f"`{_text(after)}` stands before `{_text(before)}`",
                related=(Related(f"`{_text(before)}` is here", _span(parsed, before)),),
                replica=after.lane.name.replica,
            )
    return fine


def _check_all_present(
    parsed: Parsed, lanes: Mapping[GroupName, Lane], work: Work, findings: Findings
) -> None:
    """RHP301 for micro-batches that no instruction of a stage names."""
    plan = parsed.plan
    heads: dict[int, GroupName] = {}
    for name in lanes:
        heads.setdefault(name.pp, name)
    present: dict[tuple[int, int], set[int]] = {}
    for stage, micro_batch in work.places:
        present.setdefault((stage, micro_batch.home), set()).add(micro_batch.number)
    stood_for = {
        replica
        for first, members in findings.alike.items()
        for replica in members
        if replica != first
    }
    homes = [home for home in range(plan.mesh.dp) if home not in stood_for]
    for stage, first in heads.items():
        for home in homes:
            here = present.get((stage, home), set())
            total = plan.batch.microbatches - len(here)
            if not total:
                continue
            missing = _first_missing(here, plan.batch.microbatches)
            at_home = GroupName(home, stage)
            lane = lanes.get(at_home, lanes[first])
            gone = "" if at_home in lanes else f" (replica {home} has no stream there)"
            plural = "micro-batches" if total > 1 else "micro-batch"
            findings.add(
                "RHP301",
                parsed.streams[lane.stream].head,
                f"stage {stage} never computes {plural} {listed(missing, total)} of replica "
                f"{home}{gone}",
                replica=home,
                detail=(tuple(missing), total, gone),
            )


def _first_missing(here: set[int], num_micro_batches: int) -> list[int]:
    missing: list[int] = []
    for number in range(num_micro_batches):
        if number not in here:
            missing.append(number)
            if len(missing) > 8:
                break
    return missing
