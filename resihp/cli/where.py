"""`resihp where [RUN]`: what each rank of a running job does, and who waits for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.runs import add_running, running

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_running(parser)
    parser.epilog = (
        "Ranks answer while the job runs and while it hangs. Exit status: 0 told, 2 no such run."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator and print what it knows."""
    import asyncio

    from resihp.monitor.operator import ask_where
    from resihp.monitor.where import report

    run_dir = running(args)
    print("\n".join(report(run_dir, asyncio.run(ask_where(run_dir)))))
    return 0
