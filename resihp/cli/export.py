"""`resihp export`: a schedule or plan as a file that other programs read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.csv_files import add_csv_arguments, csv_reading
from resihp.cli.plan_files import parse_text, read_text, report, write_text

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan, schedule or CSV file, or - for stdin")
    parser.add_argument(
        "--torch",
        required=True,
        choices=("compute", "comms"),
        help="write the CSV of torch.distributed.pipelining: F, I, B and W alone (its format "
        "compute_only), or with communication (compute_comms)",
    )
    parser.add_argument(
        "-o", "--output", metavar="CSV", help="where to write (default: standard output)"
    )
    add_csv_arguments(parser)
    parser.epilog = (
        "What torch's CSV cannot say is refused by name. Nothing is proved: `resihp verify` does "
        "that. Exit status: 0 done, 1 not a plan, 2 wrong use, or nothing that torch could say."
    )


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    from resihp.ir.torch_export import write_torch_csv

    text = read_text(args.file)
    parsed = parse_text(text, args.file, csv_reading(args))
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    written = write_torch_csv(parsed.plan, args.torch)
    if args.output is None:
        sys.stdout.write(written)
    else:
        write_text(args.output, written)
    return 0
