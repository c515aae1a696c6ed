"""The coordinator process: `python -m resihp.monitor.leader BRIEF NOTE PULSE TERM`.

A monitor starts it. The first three are inherited descriptors. Signals reach it through
its monitor.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from resihp.config import JobConfig
from resihp.errors import ResihpError
from resihp.monitor.checkpoints import make_directory, save_place
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.node.brief import NoteFile, read_brief
from resihp.monitor.planner import Planner
from resihp.monitor.process import ENDINGS
from resihp.monitor.pulse import Pulse
from resihp.monitor.quorum.leadership import Leadership
from resihp.monitor.run_dir import RunDir
from resihp.monitor.server import CoordinatorServer
from resihp.wire.clock import MonotonicClock
from resihp.wire.console import complain, say
from resihp.wire.loop import run
from resihp.wire.timing import Timing

__all__ = ["main"]


def main(brief_fd: int, note_fd: int, pulse_fd: int, term: int) -> int:
    """Lead the job to its end; its exit code."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    try:
        return run(_lead(brief_fd, note_fd, pulse_fd, term))
    except ResihpError as error:
        complain(f"resihp: error: {error}")
        return error.exit_code


async def _lead(brief_fd: int, note_fd: int, pulse_fd: int, term: int) -> int:
    brief, note = read_brief(brief_fd), NoteFile(note_fd).read()
    job, clock = brief.job_config(), MonotonicClock()
    timing = Timing.from_detect_within(job.job.detect_within_s)
    assert note.run_dir is not None, "a monitor leads only a run whose directory it knows"
    run_dir = RunDir(Path(note.run_dir))
    versions = save_place(job, run_dir.path)
    if versions is not None and job.checkpoint.dir is not None:
        make_directory(versions)
    coordinator = Coordinator(job, Planner(job), brief.secret, clock.now_s(), versions)
    leadership = Leadership(
        range(len(brief.addresses)),
        brief.node,
        secrets.token_hex(8),
        term,
        timing,
        clock.now_s(),
        nodes_return=brief.nodes_return,
    )
    server = CoordinatorServer(
        job, coordinator, run_dir, brief, leadership, clock, _speaker(job), versions
    )
    beating = asyncio.create_task(Pulse(pulse_fd).keep(timing.beat_s))
    try:
        return await server.serve()
    finally:
        beating.cancel()


def _speaker(job: JobConfig) -> Callable[[str], None]:
    return _say_emulated if job.device.kind == "emulated" else say


def _say_emulated(line: str) -> None:
    """No line of an emulated job can be taken for one of a real run."""
    say(line if "emulated" in line else f"emulated: {line}")


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:5]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
