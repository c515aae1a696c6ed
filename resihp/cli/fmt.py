"""`resihp fmt`: plans, schedules and programs in the canonical formatting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.cli.csv_files import is_csv
from resihp.cli.plan_files import is_json, name_of_file, parse_any, read_text, report
from resihp.errors import PlanSyntaxError, UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.source import Parsed, ParsedProgram

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("files", nargs="+", metavar="PLAN", help="plan file, or - for stdin")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-w", "--write", action="store_true", help="rewrite the files in place")
    mode.add_argument("--check", action="store_true", help="name the files that would change")
    mode.add_argument("--diff", action="store_true", help="show what would change")
    mode.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="json: print plans as JSON for other programs, without their comments",
    )
    parser.epilog = (
        "Without an option the formatted text goes to standard output. "
        "Exit status: 0 done, 1 would change (--check, --diff) or not a plan, 2 unreadable file."
    )


def run(args: argparse.Namespace) -> int:
    """Format each file; comments and order of lines stay."""
    if args.files.count("-") > 1 or (args.write and "-" in args.files):
        raise UserError("standard input can be read once only, and not be written in place")
    return max(_format_one(path, args) for path in args.files)


def _format_one(path: str, args: argparse.Namespace) -> int:
    if is_csv(path):
        raise UserError(
            f"{path} is torch's CSV, which has one form only; `resihp import` makes a plan of it"
        )
    if is_json(path) and (args.write or args.check or args.diff):
        raise UserError(
            f"{path} is JSON, which has no formatting; `resihp fmt {path}` prints its text"
        )
    from resihp.ir.printer import format_text

    text = read_text(path)
    try:
        parsed = parse_any(text, path)
    except PlanSyntaxError as error:
        report(error.diagnostics, text, path)
        return 1
    if args.format == "json":
        return _print_json(parsed, path)
    formatted = format_text(parsed[0] if isinstance(parsed, tuple) else parsed)
    if args.write:
        _write(path, text, formatted)
    elif args.check:
        if formatted != text:
            print(f"{name_of_file(path)}: would change")
    elif args.diff:
        _print_diff(path, text, formatted)
    else:
        sys.stdout.write(formatted)
    return 1 if (args.check or args.diff) and formatted != text else 0


def _print_json(parsed: Parsed | tuple[ParsedProgram, ...], path: str) -> int:
    if isinstance(parsed, tuple):
        raise UserError(f"{name_of_file(path)} holds programs; `resihp expand --format json` lists")
    from resihp.ir.plan_json import print_json

    sys.stdout.write(print_json(parsed.plan))
    return 0


def _write(path: str, text: str, formatted: str) -> None:
    if formatted == text:
        return
    try:
        Path(path).write_text(formatted, encoding="utf-8", newline="\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {reason}") from None
    print(f"{path}: formatted", file=sys.stderr)


def _print_diff(path: str, text: str, formatted: str) -> None:
    import difflib

    name = name_of_file(path)
    lines = difflib.unified_diff(
        text.splitlines(keepends=True),
        formatted.splitlines(keepends=True),
        fromfile=name,
        tofile=f"{name} (formatted)",
    )
    for line in lines:
        sys.stdout.write(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
