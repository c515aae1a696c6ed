"""Lines of blocks in their canonical spelling, read without the grammar: a text has thousands.

Every function gives what the grammar would give, or None, which says nothing about the line: the
grammar then decides. (Tests hold both to each other.) A line takes about one microsecond instead
of fifty.
"""

from __future__ import annotations

import re

from resihp.ir.levels import BODY_WORDS
from resihp.ir.model import GroupName, Instr, LayerRange, Load, Move, Op, Reshard, Restore, Source
from resihp.ir.program import TensorType, Transfer
from resihp.ir.statements import ProgramLine

__all__ = ["read_instruction", "read_program_line", "read_source"]

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_PLACE = rf"dp{_NUMBER}\.pp{_NUMBER}"
_LAYERS = rf"layers={_NUMBER}\.\.{_NUMBER}"

_WITH_MICRO_BATCH = re.compile(
    r"  (F|BW?|W|(?:scatter|send|recv|gather)_(?:act|grad))"
    rf"(?:\[{_NUMBER}\])? {_NUMBER}(?:@{_NUMBER})?(?: (->|<-) dp{_NUMBER})?"
).fullmatch
_COMPUTE = re.compile(rf"  (F|BW?|W)(?:\[{_NUMBER}\])? {_NUMBER}(?:@{_NUMBER})?").fullmatch
_WITHOUT = re.compile(
    rf"  (?:(reduce_grads|gather_params|free_params)(?:\[{_NUMBER}\])?|step)"
).fullmatch
_TRANSFER = re.compile(
    rf"  ((?:send|recv)_(?:act|grad))(?:\[{_NUMBER}\])? {_NUMBER}(?:@{_NUMBER})?"
    rf" (->|<-) ([0-9:/,]+) {_NUMBER}x{_NUMBER}x(f32|bf16)"
).fullmatch
_PEER = re.compile(rf"{_NUMBER}(?::{_NUMBER}/{_NUMBER})?").fullmatch
_ARROWS = {Op.SEND_ACT: "->", Op.SEND_GRAD: "->", Op.RECV_ACT: "<-", Op.RECV_GRAD: "<-"}

_RESHARD = re.compile(rf"  reshard {_LAYERS} {_PLACE} -> {_PLACE}").fullmatch
_MOVE = re.compile(rf"  move {_LAYERS} {_NUMBER} -> {_NUMBER}").fullmatch
_RESTORE = re.compile(rf"  restore {_LAYERS} {_NUMBER} at={_NUMBER} -> {_PLACE}").fullmatch
_LOAD = re.compile(rf"  load {_LAYERS} step={_NUMBER} -> {_PLACE}").fullmatch

_SOURCES = {"reshard": _RESHARD, "move": _MOVE, "restore": _RESTORE, "load": _LOAD}


def read_instruction(line: str) -> tuple[Instr, ...] | None:
    """The instruction of a line of a `stream` block, or both of a pair."""
    found = _WITH_MICRO_BATCH(line)
    if found is None:
        return _read_pair(line) if "&" in line else _read_without(line)
    instr = _instr(*found.groups())
    return None if instr is None else (instr,)


def _instr(
    word: str,
    stage: str | None,
    microbatch: str,
    home: str | None,
    arrow: str | None,
    peer: str | None,
) -> Instr | None:
    op = BODY_WORDS[word]
    if arrow is not None and _ARROWS.get(op) != arrow:
        return None
    return Instr(
        op,
        int(microbatch),
        None if home is None else int(home),
        None if stage is None else int(stage),
        None if peer is None else int(peer),
    )


def _read_pair(line: str) -> tuple[Instr, ...] | None:
    first, _, second = line.partition(" & ")
    found, other = _COMPUTE(first), _COMPUTE(f"  {second}")
    if found is None or other is None:
        return None
    one, other = _compute(*found.groups()), _compute(*other.groups())
    return Instr(one.op, one.microbatch, one.home, one.stage, None, True), other


def _compute(word: str, stage: str | None, microbatch: str, home: str | None) -> Instr:
    instr = _instr(word, stage, microbatch, home, None, None)
    assert instr is not None, "only an arrow makes it None"
    return instr


def _read_without(line: str) -> tuple[Instr, ...] | None:
    found = _WITHOUT(line)
    if found is None:
        return None
    word, stage = found.groups()
    if word is None:
        return (Instr(Op.STEP),)
    return (Instr(BODY_WORDS[word], None, None, None if stage is None else int(stage)),)


def read_program_line(line: str) -> tuple[ProgramLine, ...] | None:
    """The instruction of a line of a `run` block, or both of a pair."""
    found = _TRANSFER(line)
    if found is None:
        instrs = read_instruction(line)
        if instrs is None or instrs[0].op in _ARROWS:
            return None
        return tuple(ProgramLine(instr, (), None) for instr in instrs)
    word, stage, microbatch, home, arrow, peers, tokens, hidden, element = found.groups()
    transfers = _transfers(peers)
    if transfers is None or _ARROWS[BODY_WORDS[word]] != arrow:
        return None
    instr = _instr(word, stage, microbatch, home, None, None)
    assert instr is not None, "only an arrow makes it None"
    return (ProgramLine(instr, transfers, TensorType(int(tokens), int(hidden), element)),)


def _transfers(peers: str) -> tuple[Transfer, ...] | None:
    transfers: list[Transfer] = []
    for peer in peers.split(","):
        found = _PEER(peer)
        if found is None:
            return None
        rank, chunk, num_chunks = found.groups()
        transfers.append(Transfer(int(rank), int(chunk or 0), int(num_chunks or 1)))
    return tuple(transfers)


def read_source(line: str) -> Source | None:
    """The line of a `reconfigure` block."""
    word = line[2:].partition(" ")[0]
    pattern = _SOURCES.get(word)
    found = None if pattern is None else pattern(line)
    if found is None:
        return None
    first, last, *numbers = map(int, found.groups())
    if last < first:
        return None
    layers = LayerRange(first, last)
    if word == "move":
        source, target = numbers
        return Move(layers=layers, source=source, target=target)
    *others, replica, pp = numbers
    return _to_group(word, layers, others, GroupName(replica, pp))


def _to_group(word: str, layers: LayerRange, numbers: list[int], target: GroupName) -> Source:
    """A line whose target is a group; `numbers` stand between its layers and the arrow."""
    match word, numbers:
        case "load", (step,):
            return Load(layers=layers, step=step, target=target)
        case "restore", (source, giver):
            return Restore(layers=layers, source=source, giver=giver, target=target)
        case _:
            replica, pp = numbers
            return Reshard(layers=layers, source=GroupName(replica, pp), target=target)
