"""Pauses that a rank declares, as its beats carry them."""

from __future__ import annotations

import contextlib
import threading

import pytest

from resihp.errors import UserError
from resihp.executor.pause import MAX_PAUSE_S, current_pause, pause


def test_a_pause_is_there_while_it_lasts():
    """With its reason; afterwards, also by an error, there is none."""
    assert current_pause() is None
    with contextlib.suppress(ZeroDivisionError), pause("compiles", at_most_s=300):
        found = current_pause()
        assert found is not None
        assert (found.reason, found.at_most_s) == ("compiles", 300)
        raise ZeroDivisionError
    assert current_pause() is None


def test_of_several_pauses_the_one_that_lasts_longest_is_told():
    """One inside the other, and those of other threads."""
    with pause("long", at_most_s=100), pause("short", at_most_s=1):
        found: list[str] = []

        def look() -> None:
            with pause("longest", at_most_s=1000):
                now = current_pause()
                assert now is not None
                found.append(now.reason)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        now = current_pause()
        assert now is not None
        assert (found, now.reason) == (["longest"], "long")


def test_each_pause_has_its_number():
    """So that a new one for the same reason is not taken for the old one."""
    numbers: list[int] = []
    for _ in range(2):
        with pause("again", at_most_s=1):
            now = current_pause()
            assert now is not None
            numbers.append(now.number)
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize(
    ("reason", "at_most_s"), [("", 1), ("x", 0), ("x", float("nan")), ("x", MAX_PAUSE_S + 1)]
)
def test_a_pause_has_a_reason_and_an_end(reason, at_most_s):
    """The caller is told what it lacks."""
    with pytest.raises(UserError, match="a pause has a reason"), pause(reason, at_most_s=at_most_s):
        pass
