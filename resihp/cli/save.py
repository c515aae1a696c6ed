"""`resihp save [RUN]`: save a version of a running job now; it trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.runs import add_running, wish

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_running(parser)
    parser.epilog = (
        "Waits until the version is complete: after the iteration that runs, or after the recovery "
        "that does. Exit status: 0 saved, 1 it could not be written, 2 wrong use, no such run, or "
        "nothing that could be saved."
    )


def run(args: argparse.Namespace) -> int:
    """Have all ranks write their parts of a version."""
    return wish(args, "checkpoint")
