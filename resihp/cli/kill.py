"""`resihp kill --rank N`: SIGKILL one rank of a running job, to see it go on."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--rank", type=int, required=True, help="whose executor to kill")
    parser.add_argument("--run", type=Path, help="the run directory (default: the newest running)")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where runs are (default: runs)"
    )
    parser.epilog = "Exit status: 0 killed, 2 wrong use, no such run, or a rank that is not there."


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator to kill the rank."""
    import asyncio

    from resihp.monitor.operator import find_run, kill_rank

    run_dir = find_run(args.run, args.runs_dir, named_by="--run")
    print(asyncio.run(kill_rank(run_dir, args.rank)))
    return 0
