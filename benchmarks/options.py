"""Kinds of values of the benchmarks' options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an option that counts `least` or more."""

    def count(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else -1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return number

    return count


def some_of(known: Collection[int]) -> Callable[[str], list[int]]:
    """The `type` of an option that names some of `known` numbers, with commas between."""

    def numbers(text: str) -> list[int]:
        words = text.split(",")
        if not set(words) <= set(map(str, known)):
            names = ", ".join(map(str, known))
            raise argparse.ArgumentTypeError(f"{text!r}: there are {names}")
        return [int(word) for word in words]

    return numbers
