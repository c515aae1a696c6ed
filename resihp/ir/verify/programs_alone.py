"""One program without the others: its own order, and what it needs and owes at both sides.

Tensors that come from or go to other ranks are only seen from this end: there must be a receive
before the use and a send after the making, whatever the other end does.
"""

from __future__ import annotations

from resihp.ir.lanes import EDGES, Edge, Lane, Task
from resihp.ir.model import LayerRange
from resihp.ir.placement import Placement
from resihp.ir.program import Program
from resihp.ir.source import ParsedProgram
from resihp.ir.verify.crossings import Crossing
from resihp.ir.verify.dataflow import check_dataflow, check_receiver_order, check_sender_order
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.gradients import check_gradients
from resihp.ir.verify.once import Work, check_once
from resihp.ir.verify.pairs import check_pairs
from resihp.ir.verify.params import check_params
from resihp.ir.verify.programs_lift import lifted
from resihp.ir.verify.programs_messages import check_own_messages
from resihp.ir.verify.programs_places import Files
from resihp.ir.verify.ranges import check_bodies
from resihp.ir.verify.report import Report

__all__ = ["check_alone"]


def check_alone(files: Files, parsed: ParsedProgram, findings: Findings) -> None:
    """All that can be said of one program, whose first lines are right."""
    program = parsed.program
    plan = lifted(files, [parsed], [(program.rank,) * program.tp], lambda _, __: None)
    placement = _placement(program)
    lane = Lane(plan.plan.groups[0], 0, plan.plan, placement)
    lanes, report = {lane.name: lane}, Report(plan, findings)
    check_bodies(plan, placement, findings)
    check_pairs(lanes, report)
    work = check_once(lanes, report, are_all_there=False)
    check_dataflow(lanes, work, report)
    check_params(lanes, report)
    check_gradients(plan, placement, findings)
    for task in work.places:
        if task not in work.broken:
            for edge in EDGES:
                _check_sending(lane, task, edge, work, report)
                _check_receiving(lane, task, edge, work, report)
    check_own_messages(parsed, lane, report)


def _placement(program: Program) -> Placement:
    """The stages of the model: those that are here, and others somewhere else."""
    here = program.group.pp
    pp, layers = [-1] * program.num_stages, [LayerRange(0, 0)] * program.num_stages
    for stage, held in zip(program.stages, program.layers, strict=True):
        pp[stage], layers[stage] = here, held
    return Placement(tuple(layers), tuple(pp), {here: program.stages})


def _is_elsewhere(task: Task, lane: Lane, work: Work) -> bool:
    """Whether another rank computes `task`, which is next to one that is computed here."""
    return 0 <= task.stage < lane.placement.num_stages and task not in work.places


def _check_sending(lane: Lane, task: Task, edge: Edge, work: Work, report: Report) -> None:
    """RHP404, RHP406, RHP408 and RHP409 for what `task` makes."""
    produce = lane.find(edge.produce, task)
    following = task.at(task.stage + edge.stage_step)
    if produce is None or not _is_elsewhere(following, lane, work):
        return
    send, scatter = lane.first.get((edge.send, task)), lane.first.get((edge.scatter, task))
    if send is None:
        report.add(
            "RHP404",
            lane,
            produce,
            f"{lane.text(produce)} makes the {edge.what} that stage {following.stage} needs, and "
            "it is not sent",
            hint=f"add {lane.spell(edge.send, task)} with the ranks that need it",
        )
        return
    crossing = Crossing(
        edge, task, following, lane, lane, produce, scatter, send, None, None, produce
    )
    check_sender_order(crossing, report)


def _check_receiving(lane: Lane, task: Task, edge: Edge, work: Work, report: Report) -> None:
    """RHP404, RHP405, RHP408 and RHP409 for what `task` uses."""
    consume = lane.find(edge.consume, task)
    before = task.at(task.stage - edge.stage_step)
    if consume is None or not _is_elsewhere(before, lane, work):
        return
    recv, gather = lane.first.get((edge.recv, task)), lane.first.get((edge.gather, task))
    if recv is None:
        report.add(
            "RHP404",
            lane,
            consume,
            f"{lane.text(consume)} needs the {edge.what} of stage {before.stage}, which is not "
            "received",
            hint=f"add {lane.spell(edge.recv, task)} with the ranks that have it",
        )
        return
    crossing = Crossing(edge, before, task, lane, lane, consume, None, None, recv, gather, consume)
    check_receiver_order(crossing, report)
