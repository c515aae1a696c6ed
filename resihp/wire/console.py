"""Lines for whoever looks on. Processes that must live on write them here, not with `print`."""

from __future__ import annotations

import os
import sys
from typing import TextIO

__all__ = ["complain", "say"]


def say(line: str) -> None:
    """One line on standard output."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """One line on standard error."""
    _write(sys.stderr, line)


def _write(stream: TextIO, line: str) -> None:
    """No job ends because its terminal is closed or its log's disk is full.

    What cannot be written stays in the stream's buffer and would fail again at the next flush, so
    from then on the stream leads nowhere.
    """
    try:
        print(line, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
