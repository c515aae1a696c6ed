"""Lines outside of blocks in their canonical spelling, read without the grammar.

As in `canonical`: the answer is that of the grammar, or None, which says nothing about the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from resihp.ir.lines import Budget
from resihp.ir.model import (
    Batch,
    Group,
    LayerRange,
    Level,
    Mesh,
    MicroBatch,
    ModelShape,
    Precision,
    Resume,
)
from resihp.ir.statements import (
    NAME,
    Lost,
    Memory,
    Order,
    PrecisionName,
    Recompute,
    ReconfigureHead,
    Returned,
    RunHead,
    Standby,
    Statement,
    StreamHead,
    TransportName,
    Version,
    read_size,
)
from resihp.ir.transport import Transport

__all__ = ["read_statement"]

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_INTERVAL = r"(?:0|[1-9][0-9]{0,8})(?:\.\.(?:0|[1-9][0-9]{0,8}))?"
_LIST = rf"({_INTERVAL}(?:,{_INTERVAL})*)"
_AT_HOME = rf"{_INTERVAL}(?:@(?:0|[1-9][0-9]{{0,8}}))?"
_KEPT = rf"({_AT_HOME}(?:,{_AT_HOME})*)"
_SIZE = r"(0|[1-9][0-9]{0,14})(KiB|MiB|GiB)?"
_NAME = rf"({NAME.pattern})"
_SHAPE = " ".join(f"{key}={_NUMBER}" for key in ModelShape.__struct_fields__[1:])

_Found = re.Match[str]


def read_statement(line: str, budget: Budget) -> Statement | None:
    """The statement of a line outside of blocks, without `{`."""
    pattern, build = _KINDS.get(line.partition(" ")[0], (None, None))
    if pattern is None or build is None:
        return None
    found = pattern(line)
    return None if found is None else build(found, budget)


def _group(found: _Found, budget: Budget) -> Group | None:
    replica, pp, listed, intervals = found.groups()
    layers = _ranges(intervals)
    ranks = None if layers is None else _numbers(listed, budget)
    if layers is None or ranks is None:
        return None
    return Group(replica=int(replica), pp=int(pp), ranks=ranks, layers=layers)


def _resume(found: _Found, budget: Budget) -> Resume | None:
    step, listed = found.groups()
    keep: list[MicroBatch] = []
    for part in () if listed is None else listed.split(","):
        interval, _, home = part.partition("@")
        numbers = _numbers(interval, budget)
        if numbers is None:
            return None
        keep += [MicroBatch(int(home or 0), number) for number in numbers]
    return Resume(step=int(step), keep=tuple(keep))


def _stream(found: _Found, budget: Budget) -> StreamHead | None:
    replicas = _numbers(found[1], budget)
    return None if replicas is None else StreamHead(replicas, int(found[2]))


def _recompute(found: _Found, budget: Budget) -> Recompute | None:
    stages = _numbers(found[1], budget)
    return None if stages is None else Recompute(stages)


def _standby(found: _Found, budget: Budget) -> Standby | None:
    ranks = _numbers(found[1], budget)
    return None if ranks is None else Standby(ranks)


def _lost(found: _Found, budget: Budget) -> Lost | None:
    ranks = _numbers(found[1], budget)
    return None if ranks is None else Lost(ranks)


def _returned(found: _Found, budget: Budget) -> Returned | None:
    ranks = _numbers(found[1], budget)
    return None if ranks is None else Returned(ranks)


def _model(found: _Found, _: Budget) -> ModelShape:
    name, *sizes = found.groups()
    keys = ModelShape.__struct_fields__[1:]
    return ModelShape(name=name, **dict(zip(keys, map(int, sizes), strict=True)))


def _mesh(found: _Found, _: Budget) -> Mesh:
    return Mesh(tp=int(found[1]), pp=int(found[2]), dp=int(found[3]))


def _batch(found: _Found, _: Budget) -> Batch:
    return Batch(microbatches=int(found[1]), tokens=int(found[2]))


def _transport(found: _Found, _: Budget) -> TransportName:
    name, size, unit = found.groups()
    return TransportName(name or str(Transport("eager", read_size(size, unit))))


def _precision(found: _Found, _: Budget) -> PrecisionName:
    return PrecisionName(cast("Precision", found[1]))


def _kind(
    text: str, build: Callable[[_Found, Budget], Statement | None]
) -> tuple[Callable[[str], _Found | None], Callable[[_Found, Budget], Statement | None]]:
    return re.compile(text).fullmatch, build


def _version(level: Level) -> Callable[[_Found, Budget], Version]:
    return lambda found, _: Version(level, int(found[1]))


_KINDS = {
    "group": _kind(rf"group dp{_NUMBER}\.pp{_NUMBER} +ranks={_LIST} +layers={_LIST}", _group),
    "stream": _kind(rf"stream dp={_LIST} pp={_NUMBER}", _stream),
    "standby": _kind(rf"standby {_LIST}", _standby),
    "lost": _kind(rf"lost {_LIST}", _lost),
    "returned": _kind(rf"returned {_LIST}", _returned),
    **{level: _kind(f"{level} {_NUMBER}", _version(level)) for level in Level},
    "model": _kind(f"model {_NAME} {_SHAPE}", _model),
    "mesh": _kind(f"mesh tp={_NUMBER} pp={_NUMBER} dp={_NUMBER}", _mesh),
    "batch": _kind(f"batch microbatches={_NUMBER} tokens={_NUMBER}", _batch),
    "order": _kind(f"order {_NAME}", lambda found, _: Order(found[1])),
    "memory": _kind(f"memory {_SIZE}", lambda found, _: Memory(read_size(found[1], found[2]))),
    "transport": _kind(f"transport (?:(edge|pair|rank)|eager={_SIZE})", _transport),
    "precision": _kind("precision (fp32|bf16)", _precision),
    "recompute": _kind(rf"recompute {_LIST}", _recompute),
    "resume": _kind(f"resume step={_NUMBER} keep=(?:none|{_KEPT})", _resume),
    "reconfigure": _kind("reconfigure", lambda _, __: ReconfigureHead()),
    "run": _kind("run", lambda _, __: RunHead()),
}
"""First word of a line -> how it reads, and what it says."""


def _ranges(text: str) -> tuple[LayerRange, ...] | None:
    """The ranges of a list; None if one runs backwards."""
    ends = [part.partition("..") for part in text.split(",")]
    found = [LayerRange(int(first), int(last or first)) for first, _, last in ends]
    return None if any(last < first for first, last in found) else tuple(found)


def _numbers(text: str, budget: Budget) -> tuple[int, ...] | None:
    """The numbers of a list, taken from the budget; None where it has not as many."""
    ranges = _ranges(text)
    if ranges is None:
        return None
    size = sum(last - first + 1 for first, last in ranges)
    if size > budget.numbers:
        return None
    budget.numbers -= size
    if len(ranges) == 1:
        return tuple(range(ranges[0].first, ranges[0].last + 1))
    return tuple(number for first, last in ranges for number in range(first, last + 1))
