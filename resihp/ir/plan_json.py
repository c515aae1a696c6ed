"""Plans and schedules as JSON, for other programs.

The fields are those of `resihp.ir.model.Plan`, what has its default may be left out. Instructions
name their operation as the text does; places are `[replica, position]`, ranges of layers
`[first, last]`, and lines of a reconfiguration have a `type`:

    {"level": "plan", "version": 1,
     "model": {"name": "tiny", "layers": 2, ...},
     "mesh": {"tp": 1, "pp": 2, "dp": 1}, "batch": {"microbatches": 1, "tokens": 16},
     "groups": [{"replica": 0, "pp": 0, "ranks": [0], "layers": [[0, 0]]}, ...],
     "reconfigure": [{"type": "Move", "layers": [0, 0], "source": 0, "target": 1}],
     "streams": [{"replicas": [0], "pp": 0, "body": [{"op": "F", "microbatch": 0}, ...]}, ...]}

What can be said so and not in the text is refused, so that everything read has a text, whose
lines diagnostics name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import msgspec

from resihp.errors import UserError
from resihp.ir.levels import BODY_WORDS
from resihp.ir.lines import did_you_mean, list_of
from resihp.ir.model import (
    FORMAT_VERSION,
    Batch,
    Group,
    Instr,
    Level,
    Mesh,
    ModelShape,
    Plan,
    Precision,
    Resume,
    Source,
    Stream,
)
from resihp.ir.reader import MAX_TEXT
from resihp.ir.statements import NAME
from resihp.ir.transport import parse_transport

__all__ = ["plan_of_json", "print_json"]


class _Instr(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    op: str
    microbatch: int | None = None
    home: int | None = None
    stage: int | None = None
    peer: int | None = None
    paired: bool = False


class _Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: tuple[int, ...]
    pp: int
    body: tuple[_Instr, ...]


class _Document(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A plan whose instructions have their words."""

    level: Literal["schedule", "plan"]
    version: Literal[1]
    model: ModelShape
    mesh: Mesh
    batch: Batch
    schedule: str | None = None
    memory_bytes: int | None = None
    transport: str | None = None
    precision: Precision = "fp32"
    recompute: tuple[int, ...] = ()
    resume: Resume | None = None
    standby: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    reconfigure: tuple[Source, ...] = ()
    streams: tuple[_Stream, ...] = ()


def print_json(plan: Plan) -> str:
    """`plan` as JSON with a line for each group, stream and other field."""
    known: dict[Instr, _Instr] = {}
    document = _Document(
        level=cast("Literal['schedule', 'plan']", plan.level.value),
        version=FORMAT_VERSION,
        model=plan.model,
        mesh=plan.mesh,
        batch=plan.batch,
        schedule=plan.schedule,
        memory_bytes=plan.memory_bytes,
        transport=plan.transport,
        precision=plan.precision,
        recompute=plan.recompute,
        resume=plan.resume,
        standby=plan.standby,
        lost=plan.lost,
        returned=plan.returned,
        groups=plan.groups,
        reconfigure=plan.reconfigure,
        streams=tuple(
            _Stream(
                replicas=stream.replicas,
                pp=stream.pp,
                body=tuple(
                    known.get(instr) or known.setdefault(instr, _written(instr))
                    for instr in stream.body
                ),
            )
            for stream in plan.streams
        ),
    )
    return "{\n" + ",\n".join(_lines(document)) + "\n}\n"


def plan_of_json(data: bytes | str, path: str) -> Plan:
    """The plan that `print_json` wrote; `path` names the file in errors.

    Nothing is verified but that it can be written as text. Raises UserError with the place in the
    document.
    """
    if len(data) > MAX_TEXT:
        raise UserError(f"{path}: longer than {MAX_TEXT} characters")
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: no plan in JSON: {error}") from None
    for place, reason in _unsayable(document):
        raise UserError(f"{path}: {place}: {reason}")
    fields: dict[str, Any] = {
        name: getattr(document, name) for name in _Document.__struct_fields__ if name != "streams"
    }
    fields |= {"level": Level(document.level), "streams": tuple(map(_read, document.streams))}
    return Plan(**fields)


def _lines(document: _Document) -> Iterator[str]:
    """`"field": value` each; lists of Structs over several lines."""
    fields = msgspec.json.decode(msgspec.json.encode(document), type=dict[str, msgspec.Raw])
    for name, value in fields.items():
        entries = getattr(document, name)
        if name in ("groups", "reconfigure", "streams"):
            rows = ",\n    ".join(msgspec.json.encode(entry).decode() for entry in entries)
            yield f'  "{name}": [\n    {rows}\n  ]'
        else:
            yield f'  "{name}": {bytes(value).decode()}'


def _written(instr: Instr) -> _Instr:
    op, *rest = (getattr(instr, field) for field in Instr.__struct_fields__)
    return _Instr(op.mnemonic, *rest)


def _read(stream: _Stream) -> Stream:
    body = tuple(
        Instr(
            BODY_WORDS[instr.op],
            instr.microbatch,
            instr.home,
            instr.stage,
            instr.peer,
            instr.paired,
        )
        for instr in stream.body
    )
    return Stream(replicas=stream.replicas, pp=stream.pp, body=body)


def _unsayable(document: _Document) -> Iterator[tuple[str, str]]:
    """(place, reason) of what has no text."""
    names = {"model.name": document.model.name, "schedule": document.schedule}
    for place, name in names.items():
        if name is not None and not NAME.fullmatch(name):
            yield place, f"{name!r} is no name of letters, digits and ._+/-"
    if document.transport is not None:
        try:
            parse_transport(document.transport)
        except UserError as error:
            yield "transport", str(error)
    for number, group in enumerate(document.groups):
        for key in ("ranks", "layers"):
            if not getattr(group, key):
                yield f"groups[{number}].{key}", "the list is empty"
    for number, stream in enumerate(document.streams):
        if not stream.replicas:
            yield f"streams[{number}].replicas", "the list is empty"
        for place, reason in _unsayable_instrs(stream.body):
            yield f"streams[{number}].body[{place}]", reason


def _unsayable_instrs(body: Sequence[_Instr]) -> Iterator[tuple[int, str]]:
    for index, instr in enumerate(body):
        op = BODY_WORDS.get(instr.op)
        if op is None:
            advice = did_you_mean(instr.op, BODY_WORDS) or list_of(BODY_WORDS)
            yield index, f"unknown instruction {instr.op!r}; {advice}"
            return
        if (instr.microbatch is not None) != op.has_micro_batch:
            yield index, f"`{instr.op}` {'needs a' if op.has_micro_batch else 'has no'} microbatch"
        elif instr.home is not None and not op.has_micro_batch:
            yield index, f"`{instr.op}` has no home"
        elif instr.stage is not None and not op.has_stage:
            yield index, f"`{instr.op}` has no stage"
        elif instr.peer is not None and not op.is_transfer:
            yield index, f"`{instr.op}` has no peer"
        elif instr.paired and not _can_pair(body, index):
            yield index, "a pair has two of F, B, W and BW, no more and no less"


def _can_pair(body: Sequence[_Instr], index: int) -> bool:
    pair = body[index : index + 2]
    words = [BODY_WORDS.get(instr.op) for instr in pair]
    return (
        len(pair) == 2
        and all(op is not None and op.is_compute for op in words)
        and not pair[1].paired
    )
