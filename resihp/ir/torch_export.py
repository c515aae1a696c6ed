"""Plan or schedule to torch's pipelining CSV.

The file says, per rank, the actions in order; torch knows the rest: one replica, whole tensors,
every transfer to the neighbouring stage, an optimizer step at the end. What a plan says beyond
that cannot be written, and is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, Level, Op, Plan, Stream
from resihp.ir.placement import placement_of
from resihp.ir.statements import spell_instr
from resihp.ir.torch_actions import KINDS
from resihp.ir.torch_rows import CsvKind

__all__ = ["write_torch_csv"]

_KIND = {op: kind for kind, op in KINDS.items()}
_CUTS = frozenset((Op.SCATTER_ACT, Op.GATHER_ACT, Op.SCATTER_GRAD, Op.GATHER_GRAD))


def write_torch_csv(plan: Plan, kind: CsvKind) -> str:
    """The file for torch's loader with format `compute_only` or `compute_comms`.

    `compute` leaves out all that is not F, B, W or BW, so it can be made of a plan too; `comms`
    needs one. Lines end as torch's writer ends them. The plan need not be verified.

    Raises `UserError` that names what torch's CSV cannot say.
    """
    reason = next(_unsayable(plan), None)
    if reason is not None:
        raise UserError(f"torch's CSV cannot say this: {reason}")
    if kind == "comms" and plan.level is Level.SCHEDULE:
        raise UserError(
            "a schedule has no communication to write: `resihp lower` adds it, or write it as "
            "`compute`"
        )
    streams = {stream.pp: stream for stream in plan.streams}
    rows = (",".join(_cells(plan, streams[pp], kind)) for pp in range(plan.mesh.pp))
    return "".join(f"{row}\r\n" for row in rows)


def _unsayable(plan: Plan) -> Iterator[str]:
    """Everything that a plan may say and a file may not, as it reads in the plan."""
    mesh = plan.mesh
    if mesh.dp > 1:
        yield f"{mesh.dp} replicas (`dp={mesh.dp}`); it describes the pipeline of one"
    for group in plan.groups:
        if group.tp > 1:
            yield f"group {group.name} has TP degree {group.tp}; a row is one rank"
        if group.ranks != (group.pp,):
            yield f"group {group.name} is rank {group.ranks[0]}; row k is rank k"
    for what, ranks in (
        ("standby", plan.standby),
        ("lost", plan.lost),
        ("returned", plan.returned),
    ):
        if ranks:
            yield f"a `{what}` rank ({ranks[0]}); every rank runs a row"
    if plan.resume is not None:
        yield f"`resume step={plan.resume.step}`"
    if plan.reconfigure:
        yield "a `reconfigure` block"
    if plan.memory_bytes is not None:
        yield "the capacity of a device (the `memory` line)"
    if plan.transport is not None:
        yield f"`transport {plan.transport}`"
    yield from _missing(plan)
    for stream in plan.streams:
        yield from _unsayable_in(plan, stream)


def _missing(plan: Plan) -> Iterator[str]:
    """Positions without a group or without one stream."""
    groups = {group.name for group in plan.groups}
    num_streams = Counter(stream.pp for stream in plan.streams)
    for pp in range(plan.mesh.pp):
        name = GroupName(0, pp)
        if name not in groups:
            yield f"there is no group {name}; every rank runs a row"
        if num_streams[pp] != 1:
            yield f"{name} has {num_streams[pp]} streams; a rank has one row"


def _unsayable_in(plan: Plan, stream: Stream) -> Iterator[str]:
    placement = placement_of(plan)
    name = GroupName(0, stream.pp)
    for index, instr in enumerate(stream.body):
        where = f"`{spell_instr(instr)}` of {name}"
        if instr.op in _CUTS:
            yield f"{where}; tensors are sent whole"
        elif instr.home:
            yield f"{where}: a micro-batch of replica {instr.home}"
        elif instr.peer:
            yield f"{where}: a peer in replica {instr.peer}"
        elif instr.op is Op.STEP and index < len(stream.body) - 1:
            yield f"{where} before other work; torch steps at the end"
        elif instr.op.has_stage and placement.stage_of(stream.pp, instr) is None:
            yield f"{where} names no stage that stands there (see `resihp verify`)"
        elif instr.paired and not _can_pair(stream.body, index):
            yield f"{where} is overlapped, but not with one other F, B, W or BW"


def _can_pair(body: tuple[Instr, ...], index: int) -> bool:
    pair = body[index : index + 2]
    return len(pair) == 2 and all(one.op.is_compute for one in pair) and not pair[1].paired


def _cells(plan: Plan, stream: Stream, kind: CsvKind) -> Iterator[str]:
    placement = placement_of(plan)
    first: str | None = None
    for instr in stream.body:
        if instr.op is Op.STEP or (kind == "compute" and not instr.op.is_compute):
            continue
        number = "" if instr.microbatch is None else instr.microbatch
        action = f"{placement.stage_of(stream.pp, instr)}{_KIND[instr.op]}{number}"
        if instr.paired:
            first = action
        elif first is not None:
            yield f"({first};{action})OVERLAP_F_B"
            first = None
        else:
            yield action
