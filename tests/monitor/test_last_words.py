"""What the operator reads of an executor that ended with an exception."""

from __future__ import annotations

import traceback
from asyncio import TaskGroup, run

import pytest

from resihp.monitor.last_words import own_line


class Odd(Exception):  # noqa: N818 its name says nothing
    """Of somebody else."""


async def fail(error: Exception) -> None:
    async with TaskGroup() as outer, TaskGroup() as inner:
        inner.create_task(raising(error))
        outer.create_task(raising(error))


async def raising(error: Exception) -> None:
    raise error


def words_of(error: Exception) -> str:
    """As Python prints them at the end of a process."""
    with pytest.raises(ExceptionGroup) as caught:
        run(fail(error))
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("shape 3 | 4"), "ValueError: shape 3 | 4"),
        (KeyError(), "KeyError"),
        (Odd("a\nNote: b"), f"{Odd.__module__}.Odd: a"),
    ],
)
def test_of_a_group_the_exception_inside_is_said(error: Exception, line: str):
    """Not the frame that is drawn around it."""
    words = words_of(error)
    assert set(words.splitlines()[-1].strip()) == {"+", "-"}
    assert own_line(words) == line


def test_of_a_plain_traceback_and_of_other_words_the_last_line_is_said():
    """Also where nothing in them is an exception, and where there are none."""
    plain = "Traceback (most recent call last):\n  File x, line 1\nRuntimeError: gone\n"
    assert own_line(plain) == "RuntimeError: gone"
    cut = "  | in a box\n  +----\n"
    assert own_line(cut) == "in a box"
    assert own_line("resihp: started\nfree(): invalid pointer\n\n") == "free(): invalid pointer"
    assert own_line(" \n") == ""
