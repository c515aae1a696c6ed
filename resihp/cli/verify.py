"""`resihp verify`: everything that is wrong with a plan."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resihp.cli.csv_files import add_csv_arguments, csv_reading, in_cells, is_csv
from resihp.cli.plan_files import name_of_file, parse_file, parse_text, read_text
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resihp.cli.csv_files import CsvReading
    from resihp.ir.diagnostics import Diagnostic, FileFindings
    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="plan, program or CSV, or - for stdin"
    )
    parser.add_argument(
        "--previous",
        metavar="PLAN",
        help="the plan that ran before: checks that all state has a live source",
    )
    parser.add_argument(
        "--transport",
        metavar="edge|pair|rank|eager=BYTES",
        help="prove progress with one FIFO per directed rank pair (edge), per rank pair, or per "
        "rank, or with sends that block beyond BYTES (such as 4MiB) in flight (default: the plan's "
        "`transport` line, or edge)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="text (default); json for programs; github for annotations in GitHub Actions; sarif "
        "for code scanners",
    )
    parser.add_argument(
        "--lint",
        action="store_true",
        help="also warn of what plans without errors waste: idle ranks, imbalance, receives far "
        "too early or too late, needless work (RHP9xx)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    add_csv_arguments(parser)
    parser.epilog = (
        "Exit status: 0 no errors, 1 errors, 2 wrong use or unreadable file. "
        "`resihp explain CODE` tells what a finding is about."
    )


def run(args: argparse.Namespace) -> int:
    """Verify each file; 1 if any has errors, or with `--strict` warnings."""
    from resihp.ir.diagnostics import FileFindings
    from resihp.ir.parser import normalise
    from resihp.ir.verify import check_transport, has_errors

    if args.transport is not None:
        check_transport(args.transport)
    csv = csv_reading(args)
    if [args.previous, *args.files].count("-") > 1:
        raise UserError("standard input can be read once only")
    previous = None if args.previous is None else _read_previous(args.previous)
    texts = [(path, read_text(path)) for path in args.files]
    of_programs = _program_findings(texts, csv, args)
    files: list[FileFindings] = []
    for number, (path, text) in enumerate(texts):
        file = of_programs.get(number)
        if file is None:
            found = tuple(_findings(text, path, csv, previous, args))
            shown = _shown(path, args.format)
            file = FileFindings(path=shown, text=normalise(text), diagnostics=found)
        files.append(file)
        if args.format == "text":
            _print(file, texts)
    if args.format != "text":
        print(_rendered(files, args.format), end="")
    refused = any if args.strict else has_errors
    return 1 if any(refused(file.diagnostics) for file in files) else 0


def _shown(path: str, form: str) -> str:
    """The name of a file in the output: as given or, where code scanners match it with the files
    of a repository, relative to the working directory if it lies below it.
    """
    if path == "-" or form in ("text", "json"):
        return name_of_file(path)
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def _rendered(files: Sequence[FileFindings], form: str) -> str:
    match form:
        case "github":
            from resihp.ir.output_github import render_github

            return render_github(files)
        case "sarif":
            from resihp import __version__
            from resihp.ir.output_sarif import render_sarif

            return render_sarif(files, version=__version__)
        case _:
            from resihp.ir.output_json import render_json

            return render_json(files)


def _read_previous(path: str) -> Plan:
    return parse_file(read_text(path), path).plan


def _program_findings(
    texts: Sequence[tuple[str, str]], csv: CsvReading, args: argparse.Namespace
) -> dict[int, FileFindings]:
    """Findings about the files that hold programs, by their number on the command line."""
    from resihp.cli.program_files import is_program, verify_program_files

    numbers = [
        number
        for number, (path, text) in enumerate(texts)
        if not is_csv(path, csv) and is_program(text)
    ]
    if not numbers:
        return {}
    if args.previous is not None:
        raise UserError("--previous goes with plans: a program does not say what ran before")
    files = [(_shown(texts[number][0], args.format), texts[number][1]) for number in numbers]
    return dict(zip(numbers, verify_program_files(files, args.transport), strict=True))


def _findings(
    text: str, path: str, csv: CsvReading, previous: Plan | None, args: argparse.Namespace
) -> Sequence[Diagnostic]:
    parsed = parse_text(text, path, csv)
    if isinstance(parsed, tuple):
        return parsed
    found = _verified(parsed, previous, args)
    return in_cells(found, parsed, csv) if is_csv(path, csv) else found


def _verified(
    parsed: Parsed, previous: Plan | None, args: argparse.Namespace
) -> Sequence[Diagnostic]:
    from resihp.compiler.facts import facts_of
    from resihp.ir.verify import has_errors, verify

    if parsed.plan.reconfigure and previous is None:
        print(
            f"{parsed.path}: note: the reconfigure block is not checked without --previous",
            file=sys.stderr,
        )
    found = verify(parsed, previous=previous, facts=facts_of, transport=args.transport)
    if not args.lint or has_errors(found):
        return found
    from resihp.ir.lint import lint as warnings_of

    return [*found, *warnings_of(parsed, transport=args.transport)]


def _print(file: FileFindings, texts: Sequence[tuple[str, str]]) -> None:
    from resihp.ir.parser import normalise
    from resihp.ir.render import render_text, summary

    if file.diagnostics:
        others = {name_of_file(path): normalise(text) for path, text in texts}
        print(render_text(file.diagnostics, file.text, file.path, others))
    print(f"{file.path}: {summary(file.diagnostics)}")
