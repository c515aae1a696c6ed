"""Which run a verb is about, as the command line names it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resihp.wire.messages import What

__all__ = ["add_running", "add_runs_dir", "newest_runs", "running", "wish"]


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


def wish(args: argparse.Namespace, what: What) -> int:
    """Have all ranks of the running job do `what`, and print what came of it; the exit status."""
    import asyncio

    from resihp.monitor.operator import ask_all

    reply = asyncio.run(ask_all(running(args), what))
    print(reply.text)
    return 1 if reply.is_bad else 0


def newest_runs(runs_dir: Path) -> list[Path]:
    """The directories of all runs, the one that began last at the end."""
    jobs = sorted(runs_dir.glob("*/job.toml"), key=lambda path: path.stat().st_mtime)
    return [job.parent for job in jobs]
