"""What each instruction of a program needs of earlier ones, worked out once per generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr

__all__ = ["Flow", "flow_of", "undelivered"]

_ACT = (Op.F, Op.RECV_ACT, Op.GATHER_ACT, Op.SEND_ACT)
"""Operations on activations; all others with a tensor work on their gradients."""
_NOTHING = -1


class Flow(NamedTuple):
    """Where the tensors of a program come from and when they are not needed any more."""

    source: tuple[int | None, ...]
    """Per instruction: the one that delivers the tensor that it uses.

    Of F, B, BW and sends: a receive, a gather, or the F or B of the neighbouring stage on the same
    rank. Of a gather: its receive.
    """
    ends: tuple[tuple[int, ...], ...]
    """Per instruction: those whose tensor it is the last to use."""


class _Tensor(NamedTuple):
    """An activation or gradient by the stage that uses it."""

    is_act: bool
    stage: int
    home: int
    microbatch: int


def flow_of(program: Program) -> Flow:
    """The flow of a checked program; a tensor that nothing delivers is a bug of the caller."""
    sources = list(_sources(program))
    assert _NOTHING not in sources, f"instruction {sources.index(_NOTHING)} uses what nobody makes"
    return Flow(tuple(sources), _ends(sources))


def undelivered(program: Program) -> int | None:
    """The first instruction that uses a tensor which nothing before it delivers, if any."""
    sources = _sources(program)
    return next((index for index, source in enumerate(sources) if source == _NOTHING), None)


def _sources(program: Program) -> Iterator[int | None]:
    """Per instruction what delivers its tensor; None where it uses none."""
    delivered: dict[_Tensor, int] = {}
    for index, instr in enumerate(program.instrs):
        used = _used(instr, program.num_stages)
        yield None if used is None else delivered.get(used, _NOTHING)
        made = _made(instr, program.num_stages)
        if made is not None:
            delivered[made] = index


def _used(instr: ProgramInstr, num_stages: int) -> _Tensor | None:
    """What `instr` takes from elsewhere; None where it makes it itself or takes nothing."""
    op, stage = instr.op, instr.stage
    if stage is None or instr.home is None or instr.microbatch is None:
        return None
    is_first = stage == (0 if op is Op.F else num_stages - 1)
    if op in (Op.F, Op.B, Op.BW) and not is_first:
        return _Tensor(op is Op.F, stage, instr.home, instr.microbatch)
    if op.is_send:
        return _outgoing(instr, stage)
    if op.is_gather and instr.num_chunks > 1:
        return _Tensor(op in _ACT, stage, instr.home, instr.microbatch)
    return None


def _made(instr: ProgramInstr, num_stages: int) -> _Tensor | None:
    """What `instr` delivers to those behind it."""
    op, stage = instr.op, instr.stage
    if stage is None or instr.home is None or instr.microbatch is None:
        return None
    if op in (Op.F, Op.B, Op.BW):
        is_last = stage == (num_stages - 1 if op is Op.F else 0)
        return None if is_last else _outgoing(instr, stage)
    if op.is_receive or (op.is_gather and instr.num_chunks > 1):
        return _Tensor(op in _ACT, stage, instr.home, instr.microbatch)
    return None  # a gather of one chunk changes nothing: the receive delivers the whole tensor


def _outgoing(instr: ProgramInstr, stage: int) -> _Tensor:
    """What F, B or a send at `stage` hands to the next user."""
    assert instr.home is not None
    assert instr.microbatch is not None
    is_act = instr.op in _ACT
    return _Tensor(is_act, stage + (1 if is_act else -1), instr.home, instr.microbatch)


def _ends(source: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    last_user = {made: user for user, made in enumerate(source) if made is not None}
    ends: list[list[int]] = [[] for _ in source]
    for made, user in last_user.items():
        ends[user].append(made)
    return tuple(tuple(each) for each in ends)
