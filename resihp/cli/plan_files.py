"""Reading plans named on the command line, and telling what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.cli.csv_files import AS_IT_IS, CsvReading, is_csv
from resihp.errors import PlanSyntaxError, UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resihp.ir.diagnostics import Diagnostic
    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed, ParsedProgram

__all__ = [
    "add_output",
    "is_json",
    "name_of_file",
    "parse_any",
    "parse_file",
    "parse_text",
    "read_text",
    "report",
    "write_plan",
    "write_text",
]


def name_of_file(path: str) -> str:
    """What `path` is called in messages: `-` is the standard input."""
    return "<stdin>" if path == "-" else path


def is_json(path: str) -> bool:
    """Whether a file holds, or is to hold, a plan in JSON: by its name."""
    return path.lower().endswith(".json")


def read_text(path: str) -> str:
    """The text of a file or, for `-`, of the standard input; JSON becomes the text of its plan.

    Raises `UserError` if it cannot be read, or is not UTF-8 or not the JSON of a plan.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read {name_of_file(path)}: {reason}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        raise UserError(f"{name_of_file(path)} is not UTF-8 text ({where})") from None
    if not is_json(path) and not (path == "-" and text.lstrip().startswith("{")):
        return text
    from resihp.ir.plan_json import plan_of_json
    from resihp.ir.printer import print_plan

    return print_plan(plan_of_json(text, name_of_file(path)))


def parse_text(text: str, path: str, csv: CsvReading = AS_IT_IS) -> Parsed | tuple[Diagnostic, ...]:
    """The plan, or the faults that keep it from being read."""
    try:
        return parse_file(text, path, csv)
    except PlanSyntaxError as error:
        return error.diagnostics


def parse_file(text: str, path: str, csv: CsvReading = AS_IT_IS) -> Parsed:
    """The plan; a `.csv` is torch's. Raises `PlanSyntaxError`."""
    if is_csv(path, csv):
        return csv.read(text, name_of_file(path))
    from resihp.ir.parser import parse

    return parse(text, path=name_of_file(path))


def parse_any(text: str, path: str) -> Parsed | tuple[ParsedProgram, ...]:
    """The plan, schedule or CSV, or the programs. Raises `PlanSyntaxError`."""
    from resihp.ir.header import Header, read_header
    from resihp.ir.model import Level
    from resihp.ir.reader import normalise

    header = read_header(normalise(text))
    if is_csv(path) or not isinstance(header, Header) or header.level is not Level.PROGRAM:
        return parse_file(text, path)
    from resihp.ir.program_text import parse_programs

    return parse_programs(text, path=name_of_file(path))


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare where a verb writes the plan that it makes, and in which form."""
    parser.add_argument(
        "-o", "--output", metavar="PLAN", help="write the plan to this file; JSON if it ends so"
    )
    parser.add_argument(
        "--format", choices=("text", "json"), help="of the plan (default: by the file's name)"
    )


def write_plan(plan: Plan, args: argparse.Namespace) -> None:
    """Write a plan where and as `add_output` was told. Raises `UserError` if that fails."""
    from resihp.ir.plan_json import print_json
    from resihp.ir.printer import print_plan

    form = args.format or ("json" if args.output and is_json(args.output) else "text")
    text = print_json(plan) if form == "json" else print_plan(plan)
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(args.output, text)


def write_text(path: str, text: str) -> None:
    """Write a file, with newlines as they are in `text`. Raises `UserError` if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {reason}") from None


def report(findings: Sequence[Diagnostic], text: str, path: str) -> None:
    """Print findings to stderr, with the lines that they are about."""
    from resihp.ir.parser import normalise
    from resihp.ir.render import render_text

    print(render_text(findings, normalise(text), name_of_file(path)), file=sys.stderr)
