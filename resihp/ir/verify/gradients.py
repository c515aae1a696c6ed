"""Every stream reduces each stage once, after all its work, and ends with step."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.diagnostics import Related
from resihp.ir.model import Instr, Level, Op, Stream
from resihp.ir.placement import Placement
from resihp.ir.source import Parsed, StreamSource
from resihp.ir.statements import spell_instr
from resihp.ir.verify.findings import Findings

__all__ = ["check_gradients"]


def check_gradients(parsed: Parsed, placement: Placement, findings: Findings) -> None:
    """RHP701 to RHP705. One look per stream of the text; replicas that share it are alike."""
    if parsed.plan.level is Level.SCHEDULE:
        return
    known: dict[tuple[int, int], _Ends] = {}
    for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True):
        key = id(stream.body), stream.pp
        if key not in known:
            known[key] = _Ends(stream, placement)
        _check_stream(stream, source, known[key], findings)


class _Ends:
    """Where a stream reduces and steps."""

    def __init__(self, stream: Stream, placement: Placement) -> None:
        self.reduces: dict[int, list[int]] = {
            stage: [] for stage in placement.stages.get(stream.pp, ())
        }
        """Of each stage."""
        self.steps: list[int] = []
        self.is_unclear = False
        """Whether a reduce_grads names no stage here (RHP109): it may be the missing one."""
        self.late: list[tuple[int, int]] = []
        """(work, the reduce_grads of its stage before it)."""
        for index, instr in enumerate(stream.body):
            op = instr.op
            if op is Op.STEP:
                self.steps.append(index)
            elif op is Op.REDUCE_GRADS or op.has_micro_batch:
                stage = placement.stage_of(stream.pp, instr)
                if stage is None:
                    self.is_unclear = self.is_unclear or op is Op.REDUCE_GRADS
                    continue
                reduces = self.reduces[stage]
                if op is Op.REDUCE_GRADS:
                    reduces.append(index)
                elif reduces:
                    self.late.append((index, reduces[0]))

    @property
    def first_reduces(self) -> list[int]:
        """The first of each stage that has one."""
        return [indices[0] for indices in self.reduces.values() if indices]

    def twice(self) -> Iterator[tuple[int, int]]:
        """(index, index of the first) of what stands again."""
        for indices in (*self.reduces.values(), self.steps):
            yield from ((index, indices[0]) for index in indices[1:])


def _check_stream(stream: Stream, source: StreamSource, ends: _Ends, findings: Findings) -> None:
    for stage, reduces in ends.reduces.items():
        if not reduces and not ends.is_unclear:
            reduce = Instr(Op.REDUCE_GRADS, stage=stage if len(ends.reduces) > 1 else None)
            message = f"a stream of pp={stream.pp} never runs `{spell_instr(reduce)}`"
            findings.add("RHP701", source.head, message, detail=stage)
    if not ends.steps:
        findings.add("RHP702", source.head, f"a stream of pp={stream.pp} never runs `step`")
    for index, first in ends.twice():
        findings.add(
            "RHP703",
            source.span(index),
            f"{_text(stream, index)} stands twice in this stream",
            related=(Related("first here", source.span(first)),),
        )
    for index, reduce in ends.late:
        findings.add(
            "RHP704",
            source.span(index),
            f"{_text(stream, index)} stands after {_text(stream, reduce)}",
            related=(Related(f"{_text(stream, reduce)} is here", source.span(reduce)),),
        )
    if ends.steps:
        _check_step(stream, source, ends, findings)


def _check_step(stream: Stream, source: StreamSource, ends: _Ends, findings: Findings) -> None:
    step = ends.steps[0]
    after = [i for i in range(step + 1, len(stream.body)) if stream.body[i].op is not Op.STEP]
    if not after:
        return
    reduces = [index for index in ends.first_reduces if index > step]
    if reduces:
        message = f"`step` stands before {_text(stream, reduces[0])}"
        related = (Related(f"{_text(stream, reduces[0])} is here", source.span(reduces[0])),)
    else:
        message = "`step` is not the last instruction of the stream"
        related = (Related("this comes after it", source.span(after[0])),)
    findings.add("RHP705", source.span(step), message, related=related)


def _text(stream: Stream, index: int) -> str:
    return f"`{spell_instr(stream.body[index])}`"
