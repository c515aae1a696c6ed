"""`resihp audit [RUN]`: compare all replicas of a running job now; where equal, it trains on."""

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
        "Waits for the end of the iteration that runs, or of the recovery and the one after it. "
        "Replicas that differ end the job. Exit status: 0 equal, 1 they differ, 2 wrong use, no "
        "such run, or nothing that could be compared."
    )


def run(args: argparse.Namespace) -> int:
    """Have all ranks compare what they hold."""
    return wish(args, "audit")
