"""Each micro-batch runs F and its backward exactly once at every stage, in order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from resihp.ir.diagnostics import Related
from resihp.ir.kept import kept_by
from resihp.ir.lanes import COMPUTE, Lane, Task
from resihp.ir.model import GroupName, Op
from resihp.ir.verify.findings import listed
from resihp.ir.verify.report import Report

__all__ = ["Place", "Work", "check_once"]


class Place(NamedTuple):
    """An instruction of a lane."""

    lane: Lane
    position: int

    @property
    def text(self) -> str:
        """As it is written."""
        return self.lane.text(self.position)


class Work(NamedTuple):
    """Who computes what, and which of it is already reported as wrong."""

    places: dict[Task, dict[Op, Place]]
    """The first instruction of each kind."""
    broken: set[Task]


def check_once(
    lanes: Mapping[GroupName, Lane], report: Report, *, are_all_there: bool = True
) -> Work:
    """RHP301 to RHP307. What is broken here is left alone by the data flow checks.

    Unless `are_all_there`, other lanes may compute what `lanes` do not. What a lane lacks may be
    what an instruction without a stage (RHP109) was meant to be, and is not reported.
    """
    work = _collect(lanes, report)
    kept = kept_by(report.plan)
    for task in [task for task in work.places if task.micro_batch in kept]:
        _report_kept(report, task, work)
    for task, ops in work.places.items():
        if task.micro_batch in kept:
            continue
        if not _check_one(report, task, ops, once=task not in work.broken):
            work.broken.add(task)
    if are_all_there:
        _check_all_present(report, lanes, work)
    return work


def _report_kept(report: Report, task: Task, work: Work) -> None:
    """RHP307."""
    work.broken.add(task)
    first = min(work.places[task].values(), key=lambda at: at.position)
    line = report.parsed.statement("resume")
    report.add(
        "RHP307",
        *first,
        f"{first.text} runs again: the `resume` line keeps micro-batch {task.number} of replica "
        f"{task.home}",
        (Related("kept here", line),),
    )


def _collect(lanes: Mapping[GroupName, Lane], report: Report) -> Work:
    """The places of all compute instructions. Reports RHP302."""
    work = Work({}, set())
    for lane in lanes.values():
        twice = [(index, first) for index, first in lane.again if lane.body[index].op in COMPUTE]
        for index, first in twice:
            _report_twice(report, Place(lane, index), Place(lane, first), work)
        for (op, task), index in lane.first.items():
            if op not in COMPUTE:
                continue
            ops = work.places.setdefault(task, {})
            first_at = ops.setdefault(op, Place(lane, index))
            if first_at.lane is not lane:
                _report_twice(report, Place(lane, index), first_at, work)
    return work


def _report_twice(report: Report, again: Place, first: Place, work: Work) -> None:
    task = again.lane.tasks[again.position]
    assert task is not None
    work.broken.add(task)
    report.add(
        "RHP302",
        *again,
        f"{again.text} runs twice at stage {task.stage}",
        (report.here(*first, of=first.lane is not again.lane),),
    )


def _check_one(report: Report, task: Task, ops: dict[Op, Place], *, once: bool) -> bool:
    """Whether one task runs whole and in order; where not `once`, its group is not known."""
    forward = ops.get(Op.F)
    if forward is None:
        orphan = min(ops.values(), key=lambda at: at.position)
        if orphan.lane.is_unclear:
            return False
        report.add(
            "RHP301",
            *orphan,
            f"{orphan.text} has no F: micro-batch {task.number} of replica {task.home} never runs "
            f"forward at stage {task.stage}",
        )
        return False
    backward = [ops[op] for op in (Op.B, Op.W, Op.BW) if op in ops]
    if Op.BW in ops and len(backward) > 1:
        report.add(
            "RHP304",
            *ops[Op.BW],
            f"{ops[Op.BW].text} repeats what {backward[0].text} does",
            (report.here(*backward[0], of=False),),
            "keep either BW, or B and W",
        )
        return False
    if Op.BW not in ops and len(backward) < 2:
        if not forward.lane.is_unclear:
            _report_no_backward(report, forward, task, ops)
        return False
    away = [at for at in backward if at.lane is not forward.lane]
    for at in away if once else ():
        report.add(
            "RHP306",
            *at,
            f"{at.text} runs on {at.lane.name}, but its forward ran on {forward.lane.name}",
            (report.here(*forward, of=False),),
        )
    return not away and _check_order(report, [forward, *backward])


def _report_no_backward(report: Report, forward: Place, task: Task, ops: dict[Op, Place]) -> None:
    b, w, bw = (forward.lane.spell(op, task) for op in (Op.B, Op.W, Op.BW))
    if Op.B in ops:
        missing = f"{w}: its weight gradient is lost"
    elif Op.W in ops:
        missing = b
    else:
        missing = f"backward: neither {bw} nor {b} and {w}"
    report.add("RHP303", *forward, f"{forward.text} has no {missing}")


def _check_order(report: Report, in_order: list[Place]) -> bool:
    """Whether F < B < W; the instructions are of one lane."""
    fine = True
    for before, after in pairwise(in_order):
        if before.position > after.position:
            fine = False
            report.add(
                "RHP305",
                *after,
                f"{after.text} stands before {before.text}",
                (report.here(*before, of=False),),
            )
    return fine


def _check_all_present(report: Report, lanes: Mapping[GroupName, Lane], work: Work) -> None:
    """RHP301 for micro-batches that no instruction of a stage names."""
    plan = report.plan
    heads: dict[int, Lane] = {}
    for lane in lanes.values():
        for stage in lane.stages:
            heads.setdefault(stage, lane)
    kept: dict[int, set[int]] = {}
    for home, number in kept_by(report.plan):
        kept.setdefault(home, set()).add(number)
    present: dict[tuple[int, int], set[int]] = {}
    for stage, home, number in work.places:
        present.setdefault((stage, home), set()).add(number)
    stood_for = {
        replica
        for first, members in report.findings.alike.items()
        for replica in members
        if replica != first
    }
    homes = [home for home in range(plan.mesh.dp) if home not in stood_for]
    for stage, head in heads.items():
        for home in homes:
            here = present.get((stage, home), set()) | kept.get(home, set())
            if len(here) < plan.batch.microbatches:
                lane = lanes.get(GroupName(home, head.name.pp), head)
                if not lane.is_unclear:
                    _report_missing(report, stage, home, here, lane)


def _report_missing(report: Report, stage: int, home: int, here: set[int], lane: Lane) -> None:
    """RHP301 at the stream of `lane`, which is that of `home` where it has one."""
    num_micro_batches = report.plan.batch.microbatches
    total = num_micro_batches - len(here)
    missing = _first_missing(here, num_micro_batches)
    gone = "" if lane.name.replica == home else ", which has no stream there"
    plural = "micro-batches" if total > 1 else "micro-batch"
    report.findings.add(
        "RHP301",
        report.parsed.streams[lane.stream].head,
        f"stage {stage} never computes {plural} {listed(missing, total)} of replica {home}{gone}",
        replica=home,
        detail=(stage, tuple(missing), total, gone),
    )


def _first_missing(here: set[int], num_micro_batches: int) -> list[int]:
    missing: list[int] = []
    for number in range(num_micro_batches):
        if number not in here:
            missing.append(number)
            if len(missing) > 8:
                break
    return missing
