"""Every stream ends with reduce_grads and step: once each, after all weight gradients."""

from __future__ import annotations

from resihp.ir.diagnostics import Related
from resihp.ir.model import Op, Stream
from resihp.ir.source import Parsed, StreamSource
from resihp.ir.verify.findings import Findings

__all__ = ["check_gradients"]


def check_gradients(parsed: Parsed, findings: Findings) -> None:
    """RHP701 to RHP705. One look per stream of the text; replicas that share it are alike."""
    known: dict[int, tuple[list[int], list[int]]] = {}
    for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True):
        if id(stream.body) not in known:
            known[id(stream.body)] = (
                _indices(stream, Op.REDUCE_GRADS),
                _indices(stream, Op.STEP),
            )
        reduces, steps = known[id(stream.body)]
        if not reduces:
            message = f"a stream of stage {stream.pp} never runs `reduce_grads`"
            findings.add("RHP701", source.head, message)
        if not steps:
            message = f"a stream of stage {stream.pp} never runs `step`"
            findings.add("RHP702", source.head, message)
        for indices in (reduces, steps):
            for index in indices[1:]:
                findings.add(
                    "RHP703",
                    source.span(index),
                    f"`{stream.body[index].op.mnemonic}` stands twice in this stream",
                    related=(Related("first here", source.span(indices[0])),),
                )
        if reduces:
            _check_after_reduce(stream, source, reduces[0], findings)
        if steps:
            _check_step(stream, source, steps[0], reduces[:1], findings)


def _indices(stream: Stream, op: Op) -> list[int]:
    return [index for index, instr in enumerate(stream.body) if instr.op is op]


def _check_after_reduce(
    stream: Stream, source: StreamSource, reduce: int, findings: Findings
) -> None:
    for index in range(reduce + 1, len(stream.body)):
        op = stream.body[index].op
        if op.has_micro_batch:
            findings.add(
                "RHP704",
                source.span(index),
                f"`{op.mnemonic} {stream.body[index].microbatch}` stands after reduce_grads",
                related=(Related("reduce_grads is here", source.span(reduce)),),
            )


def _check_step(
    stream: Stream, source: StreamSource, step: int, reduces: list[int], findings: Findings
) -> None:
    after = [i for i in range(step + 1, len(stream.body)) if stream.body[i].op is not Op.STEP]
    if not after:
        return
    if reduces and reduces[0] > step:
        message = "`step` stands before reduce_grads"
        related = (Related("reduce_grads is here", source.span(reduces[0])),)
    else:
        message = "`step` is not the last instruction of the stream"
        related = (Related("this comes after it", source.span(after[0])),)
    findings.add("RHP705", source.span(step), message, related=related)
