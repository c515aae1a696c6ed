"""torch's pipelining CSV to plan: rows are ranks, cells are actions.

Row k is rank k, the only one at position k of the only replica; torch's stage s is our stage s. A
file of computing alone becomes a schedule, one with communication a plan. torch writes no
optimizer step: each stream of a plan gets a `step`, whose place is the end of its row. Empty cells
of compute files are idle slots; they mean nothing to torch's runtime and are dropped, and so is
the REDUCE_GRAD that torch puts into compute files of its GPipe and 1F1B.

Such a file knows neither the model nor the number of micro-batches. Where they are not given,
there is one layer per stage, all sizes are 1, and there are as many micro-batches as the busiest
stage runs forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from resihp.errors import UserError
from resihp.ir.diagnostics import Span
from resihp.ir.model import (
    Batch,
    Group,
    Instr,
    LayerRange,
    Level,
    Mesh,
    ModelShape,
    Op,
    Plan,
    Stream,
)
from resihp.ir.reader import normalise, syntax_error
from resihp.ir.source import Parsed, Places, StreamSource
from resihp.ir.torch_actions import KINDS, OLD_KINDS, Action
from resihp.ir.torch_cells import name_cells
from resihp.ir.torch_rows import (
    Cell,
    CsvKind,
    Row,
    Vocabulary,
    check_kind,
    check_stages,
    check_vocabulary,
    kind_of,
    read_rows,
)

__all__ = ["read_torch_csv"]


def read_torch_csv(
    text: str,
    *,
    path: str | None = None,
    kind: CsvKind | None = None,
    vocabulary: Vocabulary = "today",
    num_microbatches: int | None = None,
    model: ModelShape | None = None,
    tokens: int = 1,
) -> Parsed:
    """Read a schedule (`compute`) or a plan (`comms`); without `kind` the cells tell which it is.

    The places of the result are those of the cells. The layers of `model` are spread over the
    stages as evenly as they go, earlier stages first.

    Raises `PlanSyntaxError` (the user's fault) whose diagnostics hold the faults of the file, and
    `UserError` for a model with fewer layers than the file has stages.
    """
    text = normalise(text)
    rows, faults = read_rows(text)
    faults = faults or [*check_vocabulary(rows, vocabulary), *check_stages(rows)]
    kind = kind or kind_of(rows)
    faults = faults or check_kind(rows, kind)
    if faults:
        raise syntax_error(name_cells(faults, text), path)
    level = Level.PLAN if kind == "comms" else Level.SCHEDULE
    heads = tuple(Span(row.line, 1, row.end_column) for row in rows)
    stages = [_stages(row) for row in rows]
    num_stages = sum(map(len, stages))
    layers = _layers(num_stages if model is None else model.layers, num_stages)
    return Parsed(
        plan=Plan(
            model=model or _least_model(num_stages),
            mesh=Mesh(tp=1, pp=len(rows), dp=1),
            batch=Batch(microbatches=num_microbatches or _num_forwards(rows), tokens=tokens),
            groups=tuple(
                Group(replica=0, pp=pp, ranks=(pp,), layers=tuple(layers[s] for s in held))
                for pp, held in enumerate(stages)
            ),
            streams=tuple(
                Stream(replicas=(0,), pp=pp, body=tuple(_body(row, level, vocabulary)))
                for pp, row in enumerate(rows)
            ),
            level=level,
        ),
        text=text,
        path=path,
        statements={"plan": heads[0]},
        groups=heads,
        reconfigure=(),
        streams=tuple(
            StreamSource(head=head, body_line=row.line, body=_CellPlaces(row, level))
            for row, head in zip(rows, heads, strict=True)
        ),
    )


def _stages(row: Row) -> list[int]:
    return sorted({action.stage for cell in row.cells for action in cell.actions})


def _layers(num_layers: int, num_stages: int) -> list[LayerRange]:
    """Of each stage."""
    if num_layers < num_stages:
        raise UserError(
            f"{num_layers} layers cannot be spread over the {num_stages} stages of the file: "
            "every stage holds at least one"
        )
    least, more = divmod(num_layers, num_stages)
    starts = [stage * least + min(stage, more) for stage in range(num_stages + 1)]
    return [LayerRange(first, after - 1) for first, after in pairwise(starts)]


def _least_model(num_stages: int) -> ModelShape:
    """Of no file in particular: files that say the same are the same plan."""
    return ModelShape(
        name="torch-csv", layers=num_stages, hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1
    )


def _num_forwards(rows: Sequence[Row]) -> int:
    """Most different micro-batches that one stage runs forward.

    Not one more than the largest number: a wrong number would make the right ones incomplete
    instead of standing out itself.
    """
    forward: dict[int, set[int | None]] = {}
    for row in rows:
        for cell in row.cells:
            for action in cell.actions:
                if action.kind == "F":
                    forward.setdefault(action.stage, set()).add(action.microbatch)
    return max(map(len, forward.values()), default=1)


def _kept(row: Row, level: Level) -> Iterator[tuple[Cell, Action]]:
    """What becomes an instruction."""
    for cell in row.cells:
        for action in cell.actions:
            if level is Level.PLAN or action.kind != "REDUCE_GRAD":
                yield cell, action


def _body(row: Row, level: Level, vocabulary: Vocabulary) -> Iterator[Instr]:
    kinds = OLD_KINDS if vocabulary == "2024" else KINDS
    several = len(_stages(row)) > 1
    for cell, action in _kept(row, level):
        yield Instr(
            kinds[action.kind],
            action.microbatch,
            stage=action.stage if several else None,
            paired=len(cell.actions) > 1 and action is cell.actions[0],
        )
    if level is Level.PLAN:
        yield Instr(Op.STEP)


class _CellPlaces(Places):
    """In the cells of a row; `step` stands after its end."""

    def __init__(self, row: Row, level: Level) -> None:
        self._row = row
        self._level = level

    def find(self) -> Iterator[tuple[int, int, int]]:
        """All in the line of the row."""
        for cell, action in _kept(self._row, self._level):
            yield 0, cell.column + action.start, cell.column + action.end
        if self._level is Level.PLAN:
            yield 0, self._row.end_column, self._row.end_column + 1
