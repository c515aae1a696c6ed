"""An executor as the child of its supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from resihp.monitor.executor_process import ExecutorProcess, last_words
from resihp.wire.clock import MonotonicClock
from resihp.wire.messages import Beat, ExecutorExited, ExecutorStarted, Message, Start
from resihp.wire.timing import Timing


@pytest.mark.timeout(60)
def test_the_end_of_an_executor_is_told_also_without_its_log(tmp_path: Path):
    """Nobody would know of it else: the words are missing, and why is said."""
    log, told = tmp_path / "rank0.log", list[Message]()

    async def run() -> None:
        timing = Timing.from_detect_within(0.5)
        executor = ExecutorProcess(0, log, timing, MonotonicClock(), told.append)
        log.unlink()
        await executor.open(Start(rank=0, job="no job", host="127.0.0.1", struck={}, run="x"))
        while not any(isinstance(message, ExecutorExited) for message in told):
            await asyncio.sleep(timing.beat_s)
        await executor.end(None)

    asyncio.run(run())
    (exited,) = (message for message in told if isinstance(message, ExecutorExited))
    assert exited.code > 0
    assert "its log cannot be read" in exited.last_words


@pytest.mark.timeout(60)
def test_a_dead_executor_says_what_it_died_of_and_runs_no_more(tmp_path: Path):
    """Its end says who killed it and why, for a coordinator that was not there; its last beat
    says that nobody is there."""
    told = list[Message]()

    async def run() -> Beat:
        timing = Timing.from_detect_within(0.5)
        executor = ExecutorProcess(0, tmp_path / "log", timing, MonotonicClock(), told.append)
        await executor.open(Start(rank=0, job="no job", host="127.0.0.1", struck={}, run="x"))
        assert executor.progress.pid == executor.pid
        executor.hit(1.5)
        executor.kill("it was stopped for 0.3 s")
        await executor.end(None)
        executor.kill("too late")
        return executor.progress

    assert asyncio.run(run()) == Beat(step=-1, instruction=-1, runs=False, pid=0)
    started, exited = told
    assert isinstance(started, ExecutorStarted)
    assert isinstance(exited, ExecutorExited)
    assert (exited.pid, exited.code, exited.hit_s) == (started.pid, -9, 1.5)
    assert exited.fenced == "it was stopped for 0.3 s"


def test_last_words_begin_with_a_line(tmp_path: Path):
    """A line that is cut says something else."""
    log = tmp_path / "log"
    log.write_text("".join(f"line {number} of a long log\n" for number in range(1000)))
    words = last_words(log)
    assert words.startswith("line ")
    assert words.endswith("line 999 of a long log\n")
    log.write_text("short\nand whole\n")
    assert last_words(log) == "short\nand whole\n"
