"""Kinds of values of the benchmarks' options."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an option that counts `least` or more."""

    def count(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else -1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return number

    return count
