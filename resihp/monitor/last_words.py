"""What an executor's log ends with, as the coordinator reads it."""

from __future__ import annotations

from resihp.errors import UserError
from resihp.wire.messages import ExecutorExited

__all__ = ["how_it_ended", "users_mistake"]

ERROR_MARK = "resihp: error: "
"""What the last line begins with where the executor ended with an error of ours."""


def how_it_ended(message: ExecutorExited) -> str:
    """In words."""
    return f"signal {-message.code}" if message.code < 0 else f"exit code {message.code}"


def users_mistake(message: ExecutorExited) -> str | None:
    """What an executor called the user's mistake when it ended; None where it ended otherwise."""
    if message.code != UserError.exit_code:
        return None
    _, mark, words = message.last_words.rpartition(ERROR_MARK)
    return words.strip() if mark else None
