"""Lines in their canonical spelling, read without the grammar: what a text has thousands of.

Every function gives what the grammar would give, or None, which says nothing about the line: the
grammar then decides. (Tests hold both to each other.)
"""

from __future__ import annotations

import re

from resihp.ir.levels import BODY_WORDS
from resihp.ir.lines import Budget
from resihp.ir.model import Group, Instr, LayerRange, Op
from resihp.ir.program import TensorType, Transfer
from resihp.ir.statements import ProgramLine, StreamHead

__all__ = ["read_head", "read_instruction", "read_program_line"]

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_INSTRUCTION = re.compile(
    rf"([A-Za-z_]+)(?:\[{_NUMBER}\])?(?: {_NUMBER}(?:@{_NUMBER})?)?(?: (->|<-) dp{_NUMBER})?"
)
_PEER = re.compile(rf"{_NUMBER}(?::{_NUMBER}/{_NUMBER})?")
_TRANSFER = re.compile(rf"  ([^ ]+ [^ ]+) (->|<-) ([0-9:/,]+) {_NUMBER}x{_NUMBER}xf32")
_INTERVAL = r"(?:0|[1-9][0-9]{0,8})(?:\.\.(?:0|[1-9][0-9]{0,8}))?"
_LIST = rf"({_INTERVAL}(?:,{_INTERVAL})*)"
_GROUP = re.compile(rf"group +dp{_NUMBER}\.pp{_NUMBER} +ranks={_LIST} +layers={_LIST}")
_STREAM = re.compile(rf"stream dp={_LIST} pp={_NUMBER}")
_ARROWS = {Op.SEND_ACT: "->", Op.SEND_GRAD: "->", Op.RECV_ACT: "<-", Op.RECV_GRAD: "<-"}


def read_head(line: str, budget: Budget) -> Group | StreamHead | None:
    """A `group` line, or that of a `stream`."""
    found = _GROUP.fullmatch(line)
    if found is not None:
        replica, pp, ranks, layers = found.groups()
        ranges = _intervals(layers)
        numbers = None if ranges is None else _numbers(ranks, budget)
        if numbers is None or ranges is None:
            return None
        ends = tuple(LayerRange(first, last) for first, last in ranges)
        return Group(replica=int(replica), pp=int(pp), ranks=numbers, layers=ends)
    found = _STREAM.fullmatch(line)
    numbers = None if found is None else _numbers(found[1], budget)
    return None if found is None or numbers is None else StreamHead(numbers, int(found[2]))


def _numbers(text: str, budget: Budget) -> tuple[int, ...] | None:
    """The numbers of a list, taken from the budget if it has as many."""
    intervals = _intervals(text)
    if intervals is None:
        return None
    count = sum(last - first + 1 for first, last in intervals)
    if count > budget.numbers:
        return None
    budget.numbers -= count
    return tuple(number for first, last in intervals for number in range(first, last + 1))


def _intervals(text: str) -> list[tuple[int, int]] | None:
    """First and last numbers; None where an interval runs backwards."""
    ends = [part.partition("..") for part in text.split(",")]
    found = [(int(first), int(last or first)) for first, _, last in ends]
    return None if any(last < first for first, last in found) else found


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


def read_program_line(line: str) -> tuple[ProgramLine, ...] | None:
    """The instruction of a line of a `run` block, or both of a pair."""
    found = _TRANSFER.fullmatch(line)
    if found is None:
        instrs = read_instruction(line)
        if instrs is None or instrs[0].op in _ARROWS:
            return None
        return tuple(ProgramLine(instr, (), None) for instr in instrs)
    text, arrow, peers, tokens, hidden = found.groups()
    instr = _instruction(text)
    transfers = _transfers(peers)
    if instr is None or instr.peer is not None or transfers is None:
        return None
    if _ARROWS.get(instr.op) != arrow:
        return None
    return (ProgramLine(instr, transfers, TensorType(int(tokens), int(hidden))),)


def _transfers(peers: str) -> tuple[Transfer, ...] | None:
    transfers: list[Transfer] = []
    for peer in peers.split(","):
        found = _PEER.fullmatch(peer)
        if found is None:
            return None
        rank, chunk, num_chunks = found.groups()
        transfers.append(Transfer(int(rank), int(chunk or 0), int(num_chunks or 1)))
    return tuple(transfers)


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
