"""`resihp where [RUN]`: what each rank of a running job does, and who waits for whom."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="(default: the newest running)"
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where runs are (default: runs)"
    )
    parser.epilog = (
        "Ranks answer while the job runs and while it hangs. Exit status: 0 told, 2 no such run."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator and print what it knows."""
    import asyncio

    from resihp.monitor.operator import ask_where, find_run
    from resihp.monitor.where import report

    run_dir = find_run(args.run, args.runs_dir, named_by="RUN")
    print("\n".join(report(run_dir, asyncio.run(ask_where(run_dir)))))
    return 0
