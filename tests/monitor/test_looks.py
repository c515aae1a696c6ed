"""Looks at other processes, which all happen at the same moments."""

from __future__ import annotations

import asyncio

import pytest

from resihp.monitor.looks import next_look

PERIOD_S = 0.5


@pytest.mark.asyncio
async def test_all_look_in_one_turn_of_the_loop():
    """Whenever they began to wait."""
    loop = asyncio.get_running_loop()
    looked: list[int] = []
    turns = 0

    async def look(after_s: float) -> None:
        await asyncio.sleep(after_s)
        await next_look(PERIOD_S)
        looked.append(turns)

    async def count() -> None:
        nonlocal turns
        while len(looked) < 3:
            turns += 1
            await asyncio.sleep(0.002)

    await asyncio.sleep(PERIOD_S - loop.time() % PERIOD_S)
    await asyncio.gather(count(), *(look(share * PERIOD_S) for share in (0.1, 0.3, 0.5)))
    assert max(looked) - min(looked) <= 1


@pytest.mark.asyncio
async def test_two_looks_are_not_one_right_after_the_other(monkeypatch: pytest.MonkeyPatch):
    """A timer that was early would else make two of one."""
    slept: list[float] = []
    loop = asyncio.get_running_loop()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for now_s in (10.0, 10.25, 10.95):
        monkeypatch.setattr(loop, "time", lambda now_s=now_s: now_s)
        await next_look(1.0)
    monkeypatch.undo()
    assert slept == pytest.approx([1.0, 0.75, 1.05])
