"""Plans as canonical text, and any text of a plan in canonical formatting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from resihp.ir.lines import BLANKS, Budget, code_of
from resihp.ir.model import Group, Instr, Plan
from resihp.ir.reading import (
    read_instruction,
    read_program_line,
    read_source,
    read_statement,
)
from resihp.ir.source import Text
from resihp.ir.statements import (
    Lost,
    Memory,
    Order,
    PrecisionName,
    Recompute,
    ReconfigureHead,
    Returned,
    RunHead,
    Standby,
    Statement,
    StreamHead,
    TransportName,
    Version,
    columns_of,
    keyword_of,
    spell_instr,
    spell_program_line,
)

__all__ = ["format_text", "print_plan"]


class _Line(NamedTuple):
    """One line before alignment."""

    words: tuple[str, ...] = ()
    aligned: bool = False
    indent: str = ""
    comment: str = ""


def print_plan(plan: Plan) -> str:
    """The canonical text of `plan`; `parse` gives the plan back."""
    return "".join([*_layout([*_header(plan), *_places(plan)]), *_streams(plan)])


def format_text(parsed: Text) -> str:
    """The text of `parsed` with canonical spacing and spelling; comments and order stay.

    Runs of blank lines shrink to one. Formatting a formatted text changes nothing.
    """
    return "".join(_layout(_collapse(_reread(parsed.text))))


def _header(plan: Plan) -> list[_Line]:
    version = Version(plan.level, plan.version)
    statements: list[Statement] = [version, plan.model, plan.mesh, plan.batch]
    if plan.schedule is not None:
        statements.append(Order(plan.schedule))
    if plan.memory_bytes is not None:
        statements.append(Memory(plan.memory_bytes))
    if plan.transport is not None:
        statements.append(TransportName(plan.transport))
    if plan.precision != "fp32":
        statements.append(PrecisionName(plan.precision))
    if plan.recompute:
        statements.append(Recompute(plan.recompute))
    if plan.resume is not None:
        statements.append(plan.resume)
    return [_of(statement) for statement in statements]


def _places(plan: Plan) -> Iterator[_Line]:
    if plan.groups or plan.standby or plan.lost or plan.returned:
        yield _Line()
    yield from map(_of, plan.groups)
    if plan.standby:
        yield _of(Standby(plan.standby))
    if plan.lost:
        yield _of(Lost(plan.lost))
    if plan.returned:
        yield _of(Returned(plan.returned))
    if plan.reconfigure:
        yield _Line()
        yield _of(ReconfigureHead())
        yield from (_Line(columns_of(source), indent="  ") for source in plan.reconfigure)
        yield _Line(("}",))


def _streams(plan: Plan) -> Iterator[str]:
    """The blocks as text; instructions and bodies repeat, so each is spelled once."""
    lines = _Lines()
    bodies: dict[int, str] = {}
    for stream in plan.streams:
        if id(stream.body) not in bodies:
            bodies[id(stream.body)] = _body(stream.body, lines)
        head = " ".join(columns_of(StreamHead(stream.replicas, stream.pp)))
        yield f"\n{head} {{\n{bodies[id(stream.body)]}}}\n"


class _Lines(dict[int, str]):
    """The line of each instruction by its identity; all that is asked for is in a body."""

    def add(self, body: tuple[Instr, ...]) -> None:
        """Spell what has not been spelled before."""
        for instr in body:
            if id(instr) not in self:
                self[id(instr)] = f"  {spell_instr(instr)}{' &' if instr.paired else ''}\n"


def _body(body: tuple[Instr, ...], lines: _Lines) -> str:
    """The lines of a body; most are known after a few bodies."""
    assert not (body and body[-1].paired), "a pair has a second instruction"
    try:
        text = "".join(map(lines.__getitem__, map(id, body)))
    except KeyError:
        lines.add(body)
        text = "".join(map(lines.__getitem__, map(id, body)))
    # The line of the first of a pair ends with `&`: the second goes on there.
    return text.replace("&\n  ", "& ") if "&" in text else text


def _of(statement: Statement) -> _Line:
    words = columns_of(statement)
    if isinstance(statement, StreamHead | ReconfigureHead | RunHead):
        words = (*words, "{")
    return _Line(words, aligned=isinstance(statement, Group))


def _reread(text: str) -> Iterator[_Line]:
    """Each line of a readable text, reduced to its words and comment."""
    budget = Budget()
    block = ""
    tidy: dict[str, str] = {}
    for line in text.split("\n"):
        comment = line[line.index("#") :].rstrip() if "#" in line else ""
        code = code_of(line).strip(BLANKS)
        if not code:
            yield _Line(indent="  " if block and comment else "", comment=comment)
        elif code == "}":
            block = ""
            yield _Line(("}",), comment=comment)
        elif block in ("stream", "run"):
            if code not in tidy:
                tidy[code] = _respell(block, f"  {code}")
            yield _Line((tidy[code],), indent="  ", comment=comment)
        elif block == "reconfigure":
            source = read_source(f"  {code}", budget)
            assert source is not None, "the line says something"
            yield _Line(columns_of(source), indent="  ", comment=comment)
        else:
            statement = read_statement(code.removesuffix("{").rstrip(BLANKS), 1, budget)
            block = keyword_of(statement) if code.endswith("{") else ""
            yield _of(statement)._replace(comment=comment)


def _respell(block: str, line: str) -> str:
    """The instructions of a line, without its indent. A text has one kind of block with them."""
    if block == "run":
        return " & ".join(map(spell_program_line, read_program_line(line)))
    return " & ".join(map(spell_instr, read_instruction(line)))


def _collapse(lines: Iterable[_Line]) -> list[_Line]:
    """No blank lines at either end, never two in a row."""
    kept: list[_Line] = []
    for line in lines:
        blank = not line.words and not line.comment
        if not blank or (kept and (kept[-1].words or kept[-1].comment)):
            kept.append(line)
    if kept and not kept[-1].words and not kept[-1].comment:
        kept.pop()
    return kept


def _layout(lines: Sequence[_Line]) -> Iterator[str]:
    """Lines as text: neighbours that belong together have their columns and comments aligned."""
    codes = _align_words(lines)
    start = 0
    while start < len(lines):
        end = start + 1
        while end < len(lines) and lines[start].comment and _both_trail(lines[start], lines[end]):
            end += 1
        width = max(len(code) for code in codes[start:end])
        for line, code in zip(lines[start:end], codes[start:end], strict=True):
            if line.comment and line.words:
                yield f"{code:<{width}}  {line.comment}\n"
            else:
                yield f"{code}{line.comment}\n"
        start = end


def _both_trail(line: _Line, following: _Line) -> bool:
    return bool(line.words and following.words and line.comment and following.comment)


def _align_words(lines: Sequence[_Line]) -> list[str]:
    codes: list[str] = []
    start = 0
    while start < len(lines):
        end = start + 1
        while lines[start].aligned and end < len(lines) and lines[end].aligned:
            end += 1
        words = [line.words for line in lines[start:end]]
        widths = [max(map(len, column)) for column in zip(*words, strict=True)]
        for line in lines[start:end]:
            padded = (f"{word:<{width}}" for word, width in zip(line.words, widths, strict=True))
            codes.append((line.indent + " ".join(padded)).rstrip() if line.words else line.indent)
        start = end
    return codes
