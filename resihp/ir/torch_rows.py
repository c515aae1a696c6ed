"""The rows of a torch pipelining CSV, and what must be true of the whole file.

Row k is what rank k runs. A file is of one vocabulary and of one kind, computing alone or with
communication; each stage stands in one row, and no stage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.reader import MAX_ERRORS, MAX_TEXT
from resihp.ir.torch_actions import Action, CellError, read_cell

__all__ = [
    "MAX_CELLS",
    "MAX_ROWS",
    "Cell",
    "CsvKind",
    "Row",
    "Vocabulary",
    "check_kind",
    "check_stages",
    "check_vocabulary",
    "kind_of",
    "read_rows",
]

MAX_CELLS = 1 << 22
"""Most cells that are read, empty ones too."""
MAX_ROWS = 1 << 16

CsvKind = Literal["compute", "comms"]
"""torch is told by an argument of its loader which one a file is."""
Vocabulary = Literal["today", "2024"]
"""What I, B and BW mean."""

_COMMUNICATION = frozenset(("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD"))
_WITH_WEIGHTS = frozenset(("B", "W", "BW"))


class Cell(NamedTuple):
    """A cell that is not empty."""

    column: int
    """Where it starts in its line, from 1."""
    actions: tuple[Action, ...]


class Row(NamedTuple):
    """What one rank runs."""

    line: int
    end_column: int
    cells: list[Cell]
    idle: list[int]
    """Columns of the empty cells."""

    def span(self, cell: Cell, action: Action) -> Span:
        """Where the action stands in the text."""
        return Span(self.line, cell.column + action.start, cell.column + action.end)


def read_rows(text: str) -> tuple[list[Row], list[Diagnostic]]:
    """All rows of a text with newlines as `\\n`, and the faults of its cells and rows."""
    faults = _too_large(text)
    if faults:
        return [], faults
    lines = text.removesuffix("\n").split("\n")
    known: dict[str, tuple[Action, ...]] = {}
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        num_faults = len(faults)
        row = _read_row(line, number, known, faults)
        rows.append(row)
        if not row.cells and len(faults) == num_faults:
            faults.append(_empty_row(line, number, len(lines)))
        if len(faults) >= MAX_ERRORS:
            break
    return rows, faults


def _too_large(text: str) -> list[Diagnostic]:
    num_rows = text.count("\n") + 1
    for what, number, most in (
        ("characters", len(text), MAX_TEXT),
        ("rows", num_rows, MAX_ROWS),
        ("cells", text.count(",") + num_rows, MAX_CELLS),
    ):
        if number > most:
            message = f"the file has {number} {what}; at most {most} are read"
            return [Diagnostic(code="RHP006", message=message, span=Span(1, 1, 2))]
    return []


def _read_row(
    line: str, number: int, known: dict[str, tuple[Action, ...]], faults: list[Diagnostic]
) -> Row:
    """One row; cells that read the same are decoded once, in `known`."""
    row = Row(number, len(line) + 1, [], [])
    column = 1
    for text in line.split(","):
        actions = known.get(text)
        if actions is None:
            try:
                actions = known[text] = read_cell(text)
            except CellError as error:
                span = Span(number, column + error.start, column + error.end)
                fault = Diagnostic(code="RHP010", message=error.message, span=span, hint=error.hint)
                faults.append(fault)
                if len(faults) >= MAX_ERRORS:
                    break
                actions = ()
        if actions:
            row.cells.append(Cell(column, actions))
        else:
            row.idle.append(column)
        column += len(text) + 1
    return row


def _empty_row(line: str, number: int, num_rows: int) -> Diagnostic:
    what = "has only idle slots" if line.strip() else "is blank"
    message = f"the row {what}: a row is a rank, and every rank runs at least one stage"
    if num_rows == 1 and not line.strip():
        message = "the file is empty: a row is a rank, a cell an action such as `0F3`"
    return Diagnostic(code="RHP012", message=message, span=Span(number, 1, len(line) + 1))


def _places(rows: Sequence[Row]) -> Iterator[tuple[Row, Cell, Action]]:
    return ((row, cell, action) for row in rows for cell in row.cells for action in cell.actions)


def check_vocabulary(rows: Sequence[Row], vocabulary: Vocabulary) -> list[Diagnostic]:
    """RHP011: the file is of the vocabulary that it is read with.

    BW was a word of 2024 alone. Then B was the gradient of the input, so that B and W went
    together; today W goes with I.
    """
    found = [place for place in _places(rows) if place[2].kind == "I"]
    if vocabulary == "2024":
        message = "the vocabulary of 2024 has no `I`: the gradient of the input was its B"
        return [_wrong_word(found[0], message, "this is a file of today")] if found else []
    if found:
        message = "`BW` is of the 2024 vocabulary, but `I` of today's: which one is the file of?"
        hint = "today the whole backward is B"
        mixed = next((place for place in _places(rows) if place[2].kind == "BW"), None)
        return [] if mixed is None else [_wrong_word(mixed, message, hint)]
    old = _first_old(rows)
    if old is None:
        return []
    message = (
        "this file uses the 2024 vocabulary: its B is the gradient of the input (today I), its BW "
        "the whole backward (today B)"
    )
    hint = "`--vocabulary 2024` reads it; with it `resihp export` writes the file in today's words"
    return [_wrong_word(old, message, hint)]


def _first_old(rows: Sequence[Row]) -> tuple[Row, Cell, Action] | None:
    """The first BW, or the first W of a micro-batch that has B at its stage."""
    with_b = {action[:3:2] for _, _, action in _places(rows) if action.kind == "B"}
    for place in _places(rows):
        action = place[2]
        if action.kind == "BW" or (action.kind == "W" and action[:3:2] in with_b):
            return place
    return None


def _wrong_word(place: tuple[Row, Cell, Action], message: str, hint: str) -> Diagnostic:
    row, cell, action = place
    return Diagnostic(code="RHP011", message=message, span=row.span(cell, action), hint=hint)


def kind_of(rows: Sequence[Row]) -> CsvKind:
    """What the cells say: any communication, or nobody to communicate with and a reduction."""
    kinds = {action.kind for _, _, action in _places(rows)}
    alone = len(rows) == 1 and "REDUCE_GRAD" in kinds
    return "comms" if alone or kinds & _COMMUNICATION else "compute"


def check_kind(rows: Sequence[Row], kind: CsvKind) -> list[Diagnostic]:
    """RHP012: no communication in a compute file, no idle slots in one with communication."""
    if kind == "comms":
        return [_idle(row) for row in rows if row.idle][:MAX_ERRORS]
    faults: list[Diagnostic] = []
    for row in rows:
        faults += _no_communication(row)
    return faults[:MAX_ERRORS]


def _idle(row: Row) -> Diagnostic:
    more = f" (and {len(row.idle) - 1} more in this row)" if len(row.idle) > 1 else ""
    column = row.idle[0]
    return Diagnostic(
        code="RHP012",
        message=f"an empty cell{more}: a file with communication has no idle slots",
        span=Span(row.line, column, column + 1),
    )


def _no_communication(row: Row) -> Iterator[Diagnostic]:
    """Nothing but computing, and REDUCE_GRAD where torch puts it: after all work of its stage."""
    last = {
        action.stage: (cell, action)
        for cell in row.cells
        for action in cell.actions
        if action.kind in _WITH_WEIGHTS
    }
    reduced: set[int] = set()
    for cell in row.cells:
        for action in cell.actions:
            span = row.span(cell, action)
            if action.kind in _COMMUNICATION:
                message = f"`{action}` in a compute file, which holds F, I, B and W alone"
                hint = "a file with communication is read with `--kind comms`"
                yield Diagnostic(code="RHP012", message=message, span=span, hint=hint)
            elif action.kind == "REDUCE_GRAD":
                final = last.get(action.stage)
                if action.stage in reduced:
                    message = f"`{action}` stands twice in the row"
                    yield Diagnostic(code="RHP012", message=message, span=span)
                elif final is None or final[0].column > cell.column:
                    work = "any work" if final is None else f"`{final[1]}`"
                    message = f"`{action}` stands before {work} of its stage"
                    yield Diagnostic(code="RHP012", message=message, span=span)
                reduced.add(action.stage)


def check_stages(rows: Sequence[Row]) -> list[Diagnostic]:
    """RHP013: each stage in one row, and stages numbered from 0 without a gap."""
    first: dict[int, tuple[Row, Cell, Action]] = {}
    faults: list[Diagnostic] = []
    reported: set[tuple[int, int]] = set()
    for place in _places(rows):
        row, _, action = place
        before = first.setdefault(action.stage, place)
        if before[0] is not row and (action.stage, row.line) not in reported:
            reported.add((action.stage, row.line))
            faults.append(_in_two_rows(place, before))
            if len(faults) == MAX_ERRORS:
                break
    last = max(first)
    if last >= len(first):
        faults.append(_gap(first, last))
    return faults


def _in_two_rows(place: tuple[Row, Cell, Action], before: tuple[Row, Cell, Action]) -> Diagnostic:
    row, cell, action = place
    return Diagnostic(
        code="RHP013",
        message=f"stage {action.stage} is run by rank {before[0].line - 1}, and here by rank "
        f"{row.line - 1}",
        span=row.span(cell, action),
        related=(Related("it is first run here", before[0].span(before[1], before[2])),),
    )


def _gap(first: dict[int, tuple[Row, Cell, Action]], last: int) -> Diagnostic:
    row, cell, action = first[last]
    missing = next(stage for stage in range(last) if stage not in first)
    return Diagnostic(
        code="RHP013",
        message=f"there is a stage {last}, but no row runs stage {missing}: stages are numbered "
        "from 0 without a gap",
        span=row.span(cell, action),
    )
