"""Which run a verb is about, as the command line names it."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_running", "add_runs_dir", "newest_runs", "running"]


def add_running(parser: argparse.ArgumentParser) -> None:
    """Declare what `running` reads."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="(default: the newest running)"
    )
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Declare `--runs-dir`, for verbs that take the newest run where none is named."""
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where runs are (default: runs)"
    )


def running(args: argparse.Namespace) -> Path:
    """The directory of the running job. UserError where there is none."""
    from resihp.monitor.operator import find_run

    return find_run(args.run, args.runs_dir)


def newest_runs(runs_dir: Path) -> list[Path]:
    """The directories of all runs, the one that began last at the end."""
    jobs = sorted(runs_dir.glob("*/job.toml"), key=lambda path: path.stat().st_mtime)
    return [job.parent for job in jobs]
