"""Both ends of a transfer cut the tensor the same way."""

from __future__ import annotations

from resihp.ir.diagnostics import Related
from resihp.ir.verify.crossings import Crossing
from resihp.ir.verify.report import Report

__all__ = ["check_chunks", "check_tokens", "is_cut_alike"]


def is_cut_alike(crossing: Crossing) -> bool:
    """Whether both ends cut the tensor, or neither does and the TP degrees are the same."""
    cut, joined = crossing.scatter is not None, crossing.gather is not None
    return cut == joined and (cut or crossing.sender.group.tp == crossing.receiver.group.tp)


def check_chunks(crossing: Crossing, report: Report) -> None:
    """RHP409 and RHP410 for a tensor that is both sent and received."""
    edge, sender, receiver = crossing.edge, crossing.sender, crossing.receiver
    send, recv = crossing.send, crossing.recv
    assert send is not None
    assert recv is not None
    if is_cut_alike(crossing):
        return
    cut, joined = crossing.scatter is not None, crossing.gather is not None
    degrees = sender.group.tp, receiver.group.tp
    unequal = degrees[0] != degrees[1]
    code = "RHP410" if unequal else "RHP409"
    why = f" (TP {degrees[0]} -> {degrees[1]})" if unequal else ""
    if not cut:
        what = sender.spell(edge.scatter, crossing.made)
        reason = "the receiver gathers chunks" if joined else "the degrees differ"
        message = f"{sender.text(send)} needs {what} before it: {reason}{why}"
        report.add(code, sender, send, message, (report.here(receiver, recv),))
    if not joined:
        what = receiver.spell(edge.gather, crossing.used)
        reason = "the sender scatters" if cut else "the degrees differ"
        message = f"{receiver.text(recv)} needs {what} after it: {reason}{why}"
        report.add(code, receiver, recv, message, (report.here(sender, send),))


def check_tokens(crossings: list[Crossing], report: Report) -> None:
    """RHP411, once per kind of tensor and channel: at its first scatter."""
    first: dict[tuple[object, ...], Crossing] = {}
    tokens = report.plan.batch.tokens
    for crossing in crossings:
        num_chunks = max(crossing.sender.group.tp, crossing.receiver.group.tp)
        if crossing.scatter is not None and tokens % num_chunks:
            key = crossing.edge.what, crossing.sender.name, crossing.receiver.name
            before = first.setdefault(key, crossing).scatter
            if before is not None and crossing.scatter < before:
                first[key] = crossing
    batch = report.parsed.attribute(report.parsed.statement("batch"), "tokens")
    for crossing in first.values():
        assert crossing.scatter is not None
        num_chunks = max(crossing.sender.group.tp, crossing.receiver.group.tp)
        message = f"{tokens} tokens do not divide into {num_chunks} equal chunks"
        related = (Related("given here", batch),)
        report.add("RHP411", crossing.sender, crossing.scatter, message, related)
