"""The virtual-time loop: nobody waits, and waiting for ever is found at once."""

from __future__ import annotations

import asyncio

import pytest

from resihp.errors import Deadlock
from resihp.executor.emulation.virtual import BEGIN_S, run_virtually


def test_timers_come_in_the_order_of_their_times_and_take_none():
    """A year passes in the time of a few turns of the loop, and each sleeper sees its own time."""

    async def sleeper(seconds: float, seen: list[tuple[float, float]]) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time() - BEGIN_S))

    async def main() -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []
        async with asyncio.TaskGroup() as tasks:
            for seconds in (3e7, 0.25, 10.0, 0.0):
                tasks.create_task(sleeper(seconds, seen))
        return seen

    seen = run_virtually(main())
    assert [asked for asked, _ in seen] == [0.0, 0.25, 10.0, 3e7]
    assert [at for _, at in seen] == pytest.approx([0.0, 0.25, 10.0, 3e7])


def test_a_wait_for_what_never_comes_is_a_deadlock():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(main())


def test_two_who_wait_for_each_other_are_a_deadlock_and_both_are_cleaned_up():
    cleaned: list[str] = []

    async def waiter(name: str, mine: asyncio.Event, other: asyncio.Event) -> None:
        try:
            await other.wait()
            mine.set()
        finally:
            cleaned.append(name)

    async def main() -> None:
        one, other = asyncio.Event(), asyncio.Event()
        await asyncio.sleep(5)
        await asyncio.gather(waiter("one", one, other), waiter("other", other, one))

    with pytest.raises(Deadlock):
        run_virtually(main())
    assert sorted(cleaned) == ["one", "other"]


def test_a_timeout_ends_a_wait_in_no_time():
    async def main() -> None:
        async with asyncio.timeout(3600):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run_virtually(main())


def test_the_result_and_the_error_of_the_coroutine_come_out():
    async def fine() -> int:
        await asyncio.sleep(1)
        return 7

    async def broken() -> None:
        raise KeyError("x")

    assert run_virtually(fine()) == 7
    with pytest.raises(KeyError):
        run_virtually(broken())
