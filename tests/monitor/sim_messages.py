"""What monitors and coordinators of the simulated cluster say to each other, as `wire.nodes`."""

from __future__ import annotations

from typing import NamedTuple

from resihp.wire.messages import Beat, Message


class ToRank(NamedTuple):
    rank: int
    message: Message


class FromRank(NamedTuple):
    rank: int
    message: Message


class RankGone(NamedTuple):
    rank: int
    evidence: str


class NodeBeat(NamedTuple):
    number: int
    beats: dict[int, Beat]


class EvictRank(NamedTuple):
    rank: int


class Ended(NamedTuple):
    exit_code: int
    reason: str
    was_over: bool = False


def kind_of(message: object) -> str:
    """In a word, of what it carries."""
    inner = message.message if isinstance(message, ToRank) else message
    return type(inner).__name__
