"""Tensors that never leave their group: both stages are there, so nothing is sent."""

from __future__ import annotations

from resihp.ir.verify.crossings import Crossing
from resihp.ir.verify.report import Report

__all__ = ["check_handover"]


def check_handover(crossing: Crossing, report: Report) -> None:
    """RHP415 and RHP416."""
    lane, edge = crossing.sender, crossing.edge
    moves = (crossing.scatter, crossing.send, crossing.recv, crossing.gather)
    needless = [move for move in moves if move is not None]
    overlapped = lane.head_of(crossing.produce) == lane.head_of(crossing.consume)  # RHP110 has it
    early = crossing.consume < crossing.produce and not overlapped
    if not needless and not early:
        return
    made = report.here(lane, crossing.produce, f" and makes the {edge.what}")
    used = report.here(lane, crossing.consume, f" and uses the {edge.what}")
    if needless:
        names = " and ".join(lane.text(index) for index in needless)
        report.add(
            "RHP415",
            lane,
            min(needless),
            f"{lane.text(min(needless))}: stages {crossing.made.stage} and {crossing.used.stage} "
            f"both run on {lane.name}, so the {edge.what} is handed over in place",
            (made, used),
            f"remove {names}",
        )
    if early:
        report.add(
            "RHP416",
            lane,
            crossing.consume,
            f"{lane.text(crossing.consume)} stands before {lane.text(crossing.produce)}, whose "
            f"{edge.what} it uses",
            (made,),
        )
