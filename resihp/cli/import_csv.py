"""`resihp import`: a file of torch's pipelining CSV as a schedule or plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.csv_files import add_csv_arguments, csv_reading
from resihp.cli.plan_files import name_of_file, read_text, report, write_text
from resihp.errors import PlanSyntaxError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CSV", help="file, or - for stdin")
    parser.add_argument(
        "-o", "--output", metavar="PLAN", help="where to write (default: standard output)"
    )
    add_csv_arguments(parser)
    parser.epilog = (
        "A file of computing alone becomes a schedule, one with communication a plan. Nothing is "
        "proved: `resihp verify` does that, of either. "
        "Exit status: 0 done, 1 not such a file, 2 wrong use or unreadable file."
    )


def run(args: argparse.Namespace) -> int:
    """Write what the file says in the plan language."""
    from resihp.ir.printer import print_plan

    text = read_text(args.file)
    try:
        parsed = csv_reading(args).read(text, name_of_file(args.file))
    except PlanSyntaxError as error:
        report(error.diagnostics, text, args.file)
        return 1
    printed = print_plan(parsed.plan)
    if args.output is None:
        sys.stdout.write(printed)
    else:
        write_text(args.output, printed)
    return 0
