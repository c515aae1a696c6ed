"""`resihp compare [RUN REFERENCE]`: did a run train what another one did?"""

from __future__ import annotations

import argparse
from pathlib import Path

from resihp.cli.runs import newest_runs

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="a run directory and its reference (default: the last but one under runs/, "
        "compared with the last)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest relative difference of a loss that counts as equal (default: 1e-4)",
    )
    parser.epilog = (
        "Exit status: 0 equal within the tolerance, 1 different, 2 wrong use or no finished runs."
    )


def run(args: argparse.Namespace) -> int:
    """Compare losses and sample ledgers step by step; 1 where they differ."""
    from resihp.monitor.comparison import compare

    result = compare(*_two_runs(args.runs))
    print(result.text)
    return 0 if result.equal_within(args.tolerance) else 1


def _two_runs(given: list[Path]) -> tuple[Path, Path]:
    from resihp.errors import UserError

    if not given:
        given = newest_runs(Path("runs"))[-2:]
        if len(given) < 2:
            raise UserError("there are no two runs under runs/: name a run and its reference")
    if len(given) != 2:
        raise UserError(f"name a run and its reference, not {len(given)} directories")
    return given[0], given[1]
