"""One line of a plan as data, and its canonical spelling.

The parser turns lines into these, the printer turns these into lines; `fmt` does both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Level,
    Load,
    Mesh,
    MicroBatch,
    ModelShape,
    Move,
    Op,
    Precision,
    Reshard,
    Restore,
    Resume,
    Source,
)
from resihp.ir.program import TensorType, Transfer

__all__ = [
    "KEYWORDS",
    "NAME",
    "Lost",
    "Memory",
    "Order",
    "PrecisionName",
    "ProgramLine",
    "RankHead",
    "Recompute",
    "ReconfigureHead",
    "Returned",
    "RunHead",
    "Standby",
    "Statement",
    "StreamHead",
    "TransportName",
    "Version",
    "columns_of",
    "keyword_of",
    "read_size",
    "spell_instr",
    "spell_kept",
    "spell_layers",
    "spell_messages",
    "spell_numbers",
    "spell_program_line",
    "spell_size",
]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
"""What a model or schedule may be called."""

_UNIT_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


class Version(msgspec.Struct, frozen=True):
    """`plan 1`, `schedule 1` or `program 1`."""

    level: Level
    number: int


class Order(msgspec.Struct, frozen=True):
    """`order 1f1b`: how the streams were made, for information."""

    name: str


class Memory(msgspec.Struct, frozen=True):
    """`memory 16GiB`: the capacity of one device."""

    num_bytes: int


class TransportName(msgspec.Struct, frozen=True):
    """`transport edge` or `transport eager=4MiB`: what progress is proved under."""

    name: str
    """As `resihp.ir.transport` spells it."""


class PrecisionName(msgspec.Struct, frozen=True):
    """`precision bf16`: of parameters and activations."""

    name: Precision


class Recompute(msgspec.Struct, frozen=True):
    """`recompute 0,2`: stages that compute their forward again in B."""

    stages: tuple[int, ...]


class Standby(msgspec.Struct, frozen=True):
    """`standby 8,9`: healthy ranks without a group."""

    ranks: tuple[int, ...]


class Lost(msgspec.Struct, frozen=True):
    """`lost 5`: ranks that are gone."""

    ranks: tuple[int, ...]


class Returned(msgspec.Struct, frozen=True):
    """`returned 5`: ranks that were lost in the plan before and are back, without any state."""

    ranks: tuple[int, ...]


class ReconfigureHead(msgspec.Struct, frozen=True):
    """`reconfigure {`; its lines follow as `Source`."""


class StreamHead(msgspec.Struct, frozen=True):
    """`stream dp=… pp=… {`; its lines follow as `Instr`."""

    replicas: tuple[int, ...]
    pp: int


class RankHead(msgspec.Struct, frozen=True, kw_only=True):
    """`rank 4 group=dp1.pp0 member=0 tp=1 layers=0..2 stages=0 of=2`: whose program follows.

    `layers` and `stages` have one entry per stage of the group, `num_stages` counts those of the
    whole model.
    """

    rank: int
    group: GroupName
    member: int
    tp: int
    layers: tuple[LayerRange, ...]
    stages: tuple[int, ...]
    num_stages: int


class ProgramLine(NamedTuple):
    """One instruction of a program: `send_act 0@1 -> 6:0/2,7:1/2 128x256xf32`."""

    instr: Instr
    transfers: tuple[Transfer, ...]
    """Of a send or receive, as written; a peer alone takes the whole tensor."""
    tensor: TensorType | None
    """Of each message of a send or receive."""


class RunHead(msgspec.Struct, frozen=True):
    """`run {`; its lines follow as instructions of one rank."""


Statement = (
    Version
    | ModelShape
    | Mesh
    | Batch
    | Order
    | Memory
    | TransportName
    | PrecisionName
    | Recompute
    | Resume
    | Group
    | Standby
    | Lost
    | Returned
    | ReconfigureHead
    | Source
    | StreamHead
    | RankHead
    | RunHead
)

KEYWORDS: dict[type, str] = {
    Version: "plan",
    ModelShape: "model",
    Mesh: "mesh",
    Batch: "batch",
    Order: "order",
    Memory: "memory",
    TransportName: "transport",
    PrecisionName: "precision",
    Recompute: "recompute",
    Resume: "resume",
    Group: "group",
    Standby: "standby",
    Lost: "lost",
    Returned: "returned",
    ReconfigureHead: "reconfigure",
    Reshard: "reshard",
    Move: "move",
    Restore: "restore",
    Load: "load",
    StreamHead: "stream",
    RankHead: "rank",
    RunHead: "run",
}
"""First word of the line of each kind of statement, in canonical order; `Version` has its level."""


def keyword_of(statement: Statement) -> str:
    """The first word of the statement's line."""
    return statement.level if isinstance(statement, Version) else KEYWORDS[type(statement)]


def spell_numbers(numbers: Sequence[int]) -> str:
    """`0,2..4,7`: ascending runs of three or more become a range, order is kept."""
    assert numbers, "an empty list has no spelling"
    return ",".join(_spell_run(first, last) for first, last in _runs(numbers))


def spell_kept(kept: Sequence[MicroBatch]) -> str:
    """`0..3,5,0@1`, in the order given; `none` where there are none."""
    parts: list[str] = []
    for home, group in groupby(kept, key=lambda each: each.home):
        at = f"@{home}" if home else ""
        for first, last in _runs(each.number for each in group):
            is_long = last - first >= 2
            spelled = [f"{first}..{last}"] if is_long else map(str, range(first, last + 1))
            parts += [f"{each}{at}" for each in spelled]
    return ",".join(parts) or "none"


def _spell_run(first: int, last: int) -> str:
    if last - first >= 2:
        return f"{first}..{last}"
    return f"{first}" if first == last else f"{first},{last}"


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive ascending numbers as (first, last)."""
    iterator = iter(numbers)
    first = last = next(iterator)
    for number in iterator:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def spell_size(num_bytes: int) -> str:
    """Bytes in the largest unit that gives a whole number: `2GiB`, `1536MiB`, `1000`."""
    for unit, size in _UNIT_BYTES.items():
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def read_size(digits: str, unit: str | None) -> int:
    """Bytes of what `spell_size` writes, by its parts."""
    return int(digits) * (_UNIT_BYTES[unit] if unit else 1)


def spell_layers(layers: Iterable[LayerRange]) -> str:
    """`2..3,6..7`: one range per stage; neighbours stay apart."""
    return ",".join(map(str, layers))


def spell_instr(instr: Instr) -> str:
    """`F 3`, `send_act[1] 3@1 -> dp0` or `step`; without the `&` of a pair."""
    stage = "" if instr.stage is None else f"[{instr.stage}]"
    operand = "" if instr.microbatch is None else f" {instr.microbatch}"
    home = "" if instr.home is None else f"@{instr.home}"
    peer = "" if instr.peer is None else f" {_ARROWS[instr.op]} dp{instr.peer}"
    return f"{instr.op.mnemonic}{stage}{operand}{home}{peer}"


def spell_program_line(line: ProgramLine) -> str:
    """`send_act 0@1 -> 6:0/2,7:1/2 128x256xf32`; without the `&` of a pair."""
    instr, transfers, tensor = line
    if not transfers:
        return spell_instr(instr)
    return f"{spell_instr(instr)} {spell_messages(instr.op, transfers, tensor)}"


def spell_messages(op: Op, transfers: Sequence[Transfer], tensor: TensorType | None) -> str:
    """`-> 6:0/2,7:1/2 128x256xf32`: the end of the line of a send or receive."""
    return f"{_ARROWS[op]} {','.join(map(_spell_transfer, transfers))} {tensor}"


def _spell_transfer(transfer: Transfer) -> str:
    peer, chunk, num_chunks = transfer
    return str(peer) if (chunk, num_chunks) == (0, 1) else f"{peer}:{chunk}/{num_chunks}"


_ARROWS = {Op.SEND_ACT: "->", Op.SEND_GRAD: "->", Op.RECV_ACT: "<-", Op.RECV_GRAD: "<-"}
"""Only transfers have another end."""


def columns_of(statement: Statement) -> tuple[str, ...]:
    """The words of a statement's line. Group lines that follow each other are aligned by them."""
    return (keyword_of(statement), *_operands(statement))


def _spell_name(name: str) -> str:
    assert NAME.fullmatch(name), f"{name!r} cannot be written as a name"
    return name


def _fields(statement: msgspec.Struct) -> Iterator[str]:
    """`key=value` of every integer field, in the order of the Struct."""
    for key in statement.__struct_fields__:
        if key != "name":
            yield f"{key}={getattr(statement, key)}"


def _operands(statement: Statement) -> tuple[str, ...]:
    match statement:
        case Version(number=number):
            return (str(number),)
        case ModelShape():
            return (_spell_name(statement.name), *_fields(statement))
        case Mesh() | Batch():
            return tuple(_fields(statement))
        case Resume(step=step):
            return (f"step={step}", f"keep={spell_kept(statement.keep)}")
        case Order(name):
            return (_spell_name(name),)
        case TransportName(name) | PrecisionName(name):
            return (name,)
        case Memory(num_bytes):
            return (spell_size(num_bytes),)
        case Group():
            ranks, layers = spell_numbers(statement.ranks), spell_layers(statement.layers)
            return (str(statement.name), f"ranks={ranks}", f"layers={layers}")
        case Recompute(stages):
            return (spell_numbers(stages),)
        case Standby(ranks) | Lost(ranks) | Returned(ranks):
            return (spell_numbers(ranks),)
        case Reshard(layers=layers, source=source, target=target):
            return (f"layers={layers}", str(source), "->", str(target))
        case Move(layers=layers, source=source, target=target):
            return (f"layers={layers}", str(source), "->", str(target))
        case Restore(layers=layers, source=source, giver=giver, target=target):
            return (f"layers={layers}", str(source), f"at={giver}", "->", str(target))
        case Load(layers=layers, step=step, target=target):
            return (f"layers={layers}", f"step={step}", "->", str(target))
        case StreamHead(replicas, stage):
            return (f"dp={spell_numbers(replicas)}", f"pp={stage}")
        case RankHead():
            return tuple(_rank_words(statement))
        case ReconfigureHead() | RunHead():
            return ()


def _rank_words(head: RankHead) -> Iterator[str]:
    yield str(head.rank)
    yield f"group={head.group}"
    yield f"member={head.member}"
    yield f"tp={head.tp}"
    yield f"layers={spell_layers(head.layers)}"
    yield f"stages={spell_numbers(head.stages)}"
    yield f"of={head.num_stages}"
