"""Lines in their canonical spelling, read without the grammar: what a text has thousands of.

Every function gives what the grammar would give, or None, which says nothing about the line: the
grammar then decides. (Tests hold both to each other.)
"""

from __future__ import annotations

import re

from resihp.ir.levels import BODY_WORDS
from resihp.ir.model import Instr, Op

__all__ = ["read_instruction"]

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_INSTRUCTION = re.compile(
    rf"([A-Za-z_]+)(?:\[{_NUMBER}\])?(?: {_NUMBER}(?:@{_NUMBER})?)?(?: (->|<-) dp{_NUMBER})?"
)
_ARROWS = {Op.SEND_ACT: "->", Op.SEND_GRAD: "->", Op.RECV_ACT: "<-", Op.RECV_GRAD: "<-"}


def read_instruction(line: str) -> tuple[Instr, ...] | None:
    """The instruction of a line of a `stream` block, or both of a pair."""
    if not line.startswith("  "):
        return None
    first, both, second = line[2:].partition(" & ")
    instr = _instruction(first, paired=bool(both))
    if instr is None or not both:
        return None if instr is None else (instr,)
    other = _instruction(second)
    if other is None or not (instr.op.is_compute and other.op.is_compute):
        return None
    return instr, other


def _instruction(text: str, *, paired: bool = False) -> Instr | None:
    found = _INSTRUCTION.fullmatch(text)
    if found is None:
        return None
    word, stage, microbatch, home, arrow, peer = found.groups()
    op = BODY_WORDS.get(word)
    if op is None or op.has_micro_batch != (microbatch is not None):
        return None
    if (stage is not None and not op.has_stage) or (arrow is not None and _ARROWS.get(op) != arrow):
        return None
    return Instr(op, _int(microbatch), _int(home), _int(stage), _int(peer), paired)


def _int(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
