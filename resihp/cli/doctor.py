"""`resihp doctor [JOB]`: is this machine fit for a job, and what did killed jobs leave?"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job file that is to run here")
    parser.add_argument(
        "--clean", action="store_true", help="remove what killed jobs of this user left"
    )
    parser.add_argument(
        "--runs-dir", type=Path, help="where runs are (default: the job's, else runs)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = "Exit status: 0 all is well, 1 problems, 2 wrong use or a wrong job file."


def run(args: argparse.Namespace) -> int:
    """Look and tell; 1 where something is wrong."""
    from resihp.config import load
    from resihp.monitor.doctor.examination import as_json, as_text, examine

    job = None if args.job is None else load(args.job)
    runs_dir = args.runs_dir or Path("runs" if job is None else job.job.runs_dir)
    report = examine(job, runs_dir, clean=args.clean)
    print(as_json(report) if args.format == "json" else as_text(report))
    return 0 if report.num_problems == 0 else 1
