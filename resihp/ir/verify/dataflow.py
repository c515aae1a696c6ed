"""What passes from stage to stage: made, cut, sent, received, joined and used, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Related
from resihp.ir.lanes import BY_TRANSFER, COMPUTE, Lane, Task, name_of
from resihp.ir.model import GroupName, Level
from resihp.ir.verify.chunks import check_chunks, check_tokens, is_cut_alike
from resihp.ir.verify.crossings import Crossing, crossings_of
from resihp.ir.verify.handover import check_handover
from resihp.ir.verify.once import Work
from resihp.ir.verify.report import Report

__all__ = ["Matched", "check_dataflow", "check_receiver_order", "check_sender_order"]


class Matched(NamedTuple):
    """A transfer with two sound ends."""

    sender: Lane
    send: int
    receiver: Lane
    recv: int


def check_dataflow(lanes: Mapping[GroupName, Lane], work: Work, report: Report) -> list[Matched]:
    """RHP401 to RHP411 and RHP413 to RHP416. Returns what the channel order check needs."""
    crossings = list(crossings_of(work))
    if report.plan.level is Level.SCHEDULE:
        for crossing in crossings:
            if crossing.stays:
                check_handover(crossing, report)
        return []
    for lane in lanes.values():
        _check_twice(lane, report)
        _check_strays(lane, work, report)
    matched: list[Matched] = []
    for crossing in crossings:
        if crossing.stays:
            check_handover(crossing, report)
            continue
        transfer = _matched(crossing)
        if transfer is not None:
            matched.append(transfer)
        if transfer is None or not _is_in_order(crossing) or not is_cut_alike(crossing):
            _check_ends(crossing, report)
            check_sender_order(crossing, report)
            check_receiver_order(crossing, report)
    check_tokens([crossing for crossing in crossings if not crossing.stays], report)
    return matched


def _check_twice(lane: Lane, report: Report) -> None:
    """RHP403."""
    for index, first in lane.again:
        if lane.body[index].op not in COMPUTE:
            related = (Related("first here", report.span(lane, first)),)
            message = f"{lane.text(index)} stands twice in this stream"
            report.add("RHP403", lane, index, message, related)


def _check_strays(lane: Lane, work: Work, report: Report) -> None:
    """RHP407 and RHP413: transfers of tensors that have no other end, or are not made here."""
    are_all_there = not report.findings.has("RHP205")
    for (op, task), index in lane.first.items():
        edge = BY_TRANSFER.get(op)
        if edge is None:
            continue
        sends = op in (edge.scatter, edge.send)
        step = edge.stage_step if sends else -edge.stage_step
        if not 0 <= task.stage + step < lane.placement.num_stages:
            if are_all_there:
                report.add("RHP407", lane, index, _why_past_the_end(lane, index, task, sends=sends))
        elif task not in work.broken:
            here = lane.find(edge.produce if sends else edge.consume, task)
            if here is None:
                what = name_of(task, lane.name.replica)
                stage = f" at stage {task.stage}" if len(lane.stages) > 1 else ""
                message = f"{lane.text(index)}: {lane.name} does not compute {what}{stage}"
                report.add("RHP413", lane, index, message)


def _why_past_the_end(lane: Lane, index: int, task: Task, *, sends: bool) -> str:
    which = "first" if task.stage == 0 else "last"
    if lane.placement.num_stages == 1:
        which = "only one"
    nobody = "nobody to send to" if sends else "nobody to receive from"
    return f"{lane.text(index)}: stage {task.stage} is the {which}, it has {nobody} there"


def _goes_astray(lane: Lane, index: int | None, to: Lane) -> bool:
    """Whether the send or receive `index` of `lane` names another group than `to`."""
    return index is not None and lane.peer(index) != to.name.replica


def _matched(crossing: Crossing) -> Matched | None:
    """The transfer, if both ends are there, name each other and stand where they can."""
    sender, receiver = crossing.sender, crossing.receiver
    send, recv = crossing.send, crossing.recv
    if send is None or recv is None or send < crossing.produce or recv > crossing.consume:
        return None
    if _goes_astray(sender, send, receiver) or _goes_astray(receiver, recv, sender):
        return None
    return Matched(sender, send, receiver, recv)


def _is_in_order(crossing: Crossing) -> bool:
    """Whether a scatter and a gather that are there stand where they must."""
    send, recv, scatter, gather = crossing.send, crossing.recv, crossing.scatter, crossing.gather
    assert send is not None
    assert recv is not None
    return (scatter is None or crossing.produce < scatter < send) and (
        gather is None or recv < gather < crossing.consume
    )


def _check_ends(crossing: Crossing, report: Report) -> None:
    """RHP401, RHP402, RHP404, RHP414, and the chunks where both ends exist."""
    edge, sender, receiver = crossing.edge, crossing.sender, crossing.receiver
    to_write = sender.spell(edge.send, crossing.made, receiver.name.replica)
    to_read = receiver.spell(edge.recv, crossing.used, sender.name.replica)
    if crossing.send is None and crossing.recv is None:
        makes = report.here(sender, crossing.produce, f" and makes the {edge.what}")
        report.add(
            "RHP404",
            receiver,
            crossing.consume,
            f"{receiver.text(crossing.consume)} needs the {edge.what} of {sender.name}, which is "
            "neither sent nor received",
            (makes,),
            f"add {to_write} there and {to_read} here",
        )
        return
    if crossing.send is not None and crossing.recv is not None:
        check_chunks(crossing, report)
    _check_send(crossing, to_write, to_read, report)
    _check_recv(crossing, to_write, to_read, report)


def _check_send(crossing: Crossing, to_write: str, to_read: str, report: Report) -> None:
    """RHP402 and RHP414."""
    sender, receiver, send = crossing.sender, crossing.receiver, crossing.send
    if send is None:
        return
    uses = report.here(receiver, crossing.consume, f" and needs the {crossing.edge.what}")
    if not _goes_astray(sender, send, receiver):
        if crossing.recv is None:
            message = f"{sender.text(send)} has no receive: {receiver.name} lacks {to_read}"
            report.add("RHP402", sender, send, message, (uses,))
    elif sender.peer(send) < report.plan.mesh.dp:  # RHP102 has the others
        also = f", and add {to_read} there" if crossing.recv is None else ""
        report.add(
            "RHP414",
            sender,
            send,
            f"{sender.text(send)} goes to replica {sender.peer(send)}, but "
            f"{receiver.text(crossing.consume)}, which needs it, runs on {receiver.name}",
            (uses,),
            f"write {to_write}{also}",
        )


def _check_recv(crossing: Crossing, to_write: str, to_read: str, report: Report) -> None:
    """RHP401 and RHP414."""
    sender, receiver, recv = crossing.sender, crossing.receiver, crossing.recv
    if recv is None:
        return
    makes = report.here(sender, crossing.produce, f" and makes the {crossing.edge.what}")
    if not _goes_astray(receiver, recv, sender):
        if crossing.send is None:
            message = f"{receiver.text(recv)} has no send: {sender.name} lacks {to_write}"
            report.add("RHP401", receiver, recv, message, (makes,))
    elif receiver.peer(recv) < report.plan.mesh.dp:
        also = f", and add {to_write} there" if crossing.send is None else ""
        report.add(
            "RHP414",
            receiver,
            recv,
            f"{receiver.text(recv)} waits for replica {receiver.peer(recv)}, but "
            f"{sender.text(crossing.produce)}, which makes it, runs on {sender.name}",
            (makes,),
            f"write {to_read}{also}",
        )


def check_sender_order(crossing: Crossing, report: Report) -> None:
    """RHP406 and RHP408 at the sender."""
    sender, produce, send = crossing.sender, crossing.produce, crossing.send
    scatter = crossing.scatter
    made = (report.here(sender, produce),)
    if send is not None and send < produce:
        message = f"{sender.text(send)} stands before {sender.text(produce)}"
        report.add("RHP406", sender, send, message, made)
    elif scatter is not None and (send is None or not produce < scatter < send):
        before = sender.text(produce)
        message = f"{sender.text(scatter)} must stand between {before} and the send"
        report.add("RHP408", sender, scatter, message, made)


def check_receiver_order(crossing: Crossing, report: Report) -> None:
    """RHP405 and RHP408 at the receiver."""
    receiver, consume, recv = crossing.receiver, crossing.consume, crossing.recv
    gather = crossing.gather
    used = (report.here(receiver, consume),)
    if recv is not None and recv > consume:
        message = f"{receiver.text(recv)} stands after {receiver.text(consume)}"
        report.add("RHP405", receiver, recv, message, used)
    elif gather is not None and (recv is None or not recv < gather < consume):
        after = receiver.text(consume)
        message = f"{receiver.text(gather)} must stand between the receive and {after}"
        report.add("RHP408", receiver, gather, message, used)
