"""`resihp train JOB`: run a job on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("job", type=Path, help="the job file (TOML)")
    parser.add_argument(
        "--no-inject", action="store_true", help="leave out the faults that the job file injects"
    )
    parser.epilog = (
        "Exit status: 0 finished, 1 stopped by an error or a refused plan, 2 wrong use or a wrong "
        "job file, 4 more lost than any plan can carry, 130 interrupted, 128 + N ended by signal N."
    )


def run(args: argparse.Namespace) -> int:
    """Start one supervisor per rank and wait; the exit code of the job."""
    import asyncio

    from resihp.config import load
    from resihp.monitor.launcher import Launcher
    from resihp.monitor.preflight import check_job

    job = load(args.job)
    check_job(job, args.job)

    async def launch() -> int:
        return await Launcher(job, args.job, inject=not args.no_inject).run()

    return asyncio.run(launch())
