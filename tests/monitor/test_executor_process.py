"""An executor as the child of its supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from resihp.monitor.executor_process import ExecutorProcess
from resihp.wire.messages import ExecutorExited, Message, Start
from resihp.wire.timing import Timing


@pytest.mark.timeout(60)
def test_the_end_of_an_executor_is_told_also_without_its_log(tmp_path: Path):
    """Nobody would know of it else: the words are missing, and why is said."""
    log, told = tmp_path / "rank0.log", list[Message]()

    async def run() -> None:
        timing = Timing.from_detect_within(0.5)
        executor = ExecutorProcess(0, log, timing, told.append)
        log.unlink()
        await executor.open(Start(rank=0, job="no job", host="127.0.0.1", struck={}, run="x"))
        while not any(isinstance(message, ExecutorExited) for message in told):
            await asyncio.sleep(timing.beat_s)
        await executor.end(None)

    asyncio.run(run())
    (exited,) = (message for message in told if isinstance(message, ExecutorExited))
    assert exited.code > 0
    assert "its log cannot be read" in exited.last_words
