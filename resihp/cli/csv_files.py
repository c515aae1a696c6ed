"""torch's pipelining CSV on the command line: which files are such, and how they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resihp.ir.diagnostics import Diagnostic
    from resihp.ir.source import Parsed
    from resihp.ir.torch_rows import CsvKind, Vocabulary

__all__ = ["AS_IT_IS", "CsvReading", "add_csv_arguments", "csv_reading", "in_cells", "is_csv"]


class CsvReading(NamedTuple):
    """What the command line says about CSV files; `read_torch_csv` explains it."""

    kind: CsvKind | None = None
    vocabulary: Vocabulary = "today"
    num_microbatches: int | None = None

    def read(self, text: str, path: str) -> Parsed:
        """The schedule or plan; raises `PlanSyntaxError`."""
        from resihp.ir.torch_csv import read_torch_csv

        return read_torch_csv(text, path=path, **self._asdict())


AS_IT_IS = CsvReading()
"""Without options the cells decide."""


def add_csv_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how files of torch's pipelining CSV are read."""
    group = parser.add_argument_group("files of torch's pipelining CSV (named *.csv)")
    group.add_argument(
        "--kind",
        choices=("compute", "comms"),
        help="what the file holds: F, I, B and W alone, or communication too (default: its cells "
        "tell). With it the standard input is read as CSV",
    )
    group.add_argument(
        "--vocabulary",
        choices=("today", "2024"),
        default="today",
        help="2024: B is the gradient of the input and BW the whole backward, today's I and B",
    )
    group.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="how many there are (default: as many as the busiest stage runs forward)",
    )


def csv_reading(args: argparse.Namespace) -> CsvReading:
    """What `add_csv_arguments` was given. Raises `UserError`."""
    from resihp.errors import UserError

    if args.microbatches is not None and args.microbatches < 1:
        raise UserError(f"--microbatches {args.microbatches}: a step has at least 1")
    return CsvReading(args.kind, args.vocabulary, args.microbatches)


def is_csv(path: str, reading: CsvReading = AS_IT_IS) -> bool:
    """Whether a file is read as CSV: by its name, the standard input by `--kind`."""
    return path.lower().endswith(".csv") or (path == "-" and reading.kind is not None)


def in_cells(
    findings: Sequence[Diagnostic], parsed: Parsed, reading: CsvReading = AS_IT_IS
) -> list[Diagnostic]:
    """What the verifier says about a CSV, in rows and cells."""
    from resihp.ir.torch_cells import explain_words, name_cells

    # The words of 2024 are those of the findings.
    explained = findings if reading.vocabulary == "2024" else explain_words(findings)
    return name_cells(explained, parsed.text)
