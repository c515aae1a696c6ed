"""One thing that was looked at."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Level", "note", "problem", "well"]

Level = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, in words."""

    topic: str
    level: Level
    """`problem`: somebody should do something about it; what, is in the text."""
    text: str


def well(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding(topic=topic, level="ok", text=text)


def note(topic: str, text: str) -> Finding:
    """Good to know."""
    return Finding(topic=topic, level="note", text=text)


def problem(topic: str, text: str) -> Finding:
    """Something to do."""
    return Finding(topic=topic, level="problem", text=text)
