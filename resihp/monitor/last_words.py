"""What an executor's log ends with, as the coordinator reads it."""

from __future__ import annotations

from resihp.errors import UserError
from resihp.wire.messages import ExecutorExited

__all__ = ["how_it_ended", "own_line", "users_mistake"]

BOX = " |+-"
HEAD = "Traceback (most recent call last):"
ERROR_MARK = "resihp: error: "
"""What the last line begins with where the executor ended with an error of ours."""


def how_it_ended(message: ExecutorExited) -> str:
    """In words."""
    return f"signal {-message.code}" if message.code < 0 else f"exit code {message.code}"


def own_line(last_words: str) -> str:
    """The line that says what was wrong: an exception's own, else the last one; empty: none.

    It is the first line after the last traceback that stands as far left as the traceback's head:
    a group of exceptions is drawn as boxes, which end with a line that says nothing.
    """
    lines = last_words.rstrip().splitlines()
    heads = [number for number, line in enumerate(lines) if HEAD in line]
    for number in heads[-1:]:
        column = lines[number].index(HEAD)
        for line in lines[number + 1 :]:
            if line[column : column + 1].strip(BOX):
                return line[column:].strip()
    said = [line.strip(BOX) for line in lines]
    return next((line for line in reversed(said) if line), "")


def users_mistake(message: ExecutorExited) -> str | None:
    """What an executor called the user's mistake when it ended; None where it ended otherwise."""
    if message.code != UserError.exit_code:
        return None
    _, mark, words = message.last_words.rpartition(ERROR_MARK)
    return words.strip() if mark else None
