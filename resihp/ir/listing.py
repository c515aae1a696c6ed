"""One rank's program for other tools: a record per instruction, with peers, chunks and bytes."""

from __future__ import annotations

import msgspec

from resihp.ir.program import Program, ProgramInstr, boundary_type

__all__ = ["ListedInstr", "ListedTransfer", "Listing", "listing", "notes_of"]


class ListedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a send or receive: chunk `chunk` of `num_chunks` to or from `peer`."""

    peer: int
    chunk: int
    num_chunks: int
    num_bytes: int


class ListedInstr(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction with everything resolved."""

    index: int
    op: str
    """As plans spell it."""
    stage: int | None = None
    home: int | None = None
    """Logical replica that the micro-batch belongs to."""
    microbatch: int | None = None
    paired: bool = False
    """Computed overlapped with the next one."""
    transfers: tuple[ListedTransfer, ...] = ()
    num_chunks: int | None = None
    """Chunks that a scatter cuts and a gather joins."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs in one iteration."""

    rank: int
    group: str
    tp: int
    tp_index: int
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each stage."""
    stages: tuple[int, ...]
    num_stages: int
    boundary_bytes: int
    """A whole activation between stages, or its gradient."""
    instrs: tuple[ListedInstr, ...]


def listing(program: Program) -> Listing:
    """`program` with sizes."""
    return Listing(
        rank=program.rank,
        group=str(program.group),
        tp=program.tp,
        tp_index=program.tp_index,
        layers=program.layers,
        stages=program.stages,
        num_stages=program.num_stages,
        boundary_bytes=boundary_type(program).num_bytes,
        instrs=tuple(_instr(index, instr) for index, instr in enumerate(program.instrs)),
    )


def _instr(index: int, instr: ProgramInstr) -> ListedInstr:
    cuts = not instr.transfers and instr.num_chunks > 1
    num_bytes = 0 if instr.tensor is None else instr.tensor.num_bytes
    return ListedInstr(
        index=index,
        op=instr.op.mnemonic,
        stage=instr.stage,
        home=instr.home,
        microbatch=instr.microbatch,
        paired=instr.paired,
        transfers=tuple(
            ListedTransfer(peer=peer, chunk=chunk, num_chunks=num_chunks, num_bytes=num_bytes)
            for peer, chunk, num_chunks in instr.transfers
        ),
        num_chunks=instr.num_chunks if cuts else None,
    )


def notes_of(program: Program) -> dict[int, str]:
    """What a reader may want to know beyond the text, by index of the instruction."""
    notes: dict[int, str] = {}
    for index, instr in enumerate(program.instrs):
        if instr.tensor is not None:
            times = f"{len(instr.transfers)} x " if len(instr.transfers) > 1 else ""
            notes[index] = f"{times}{instr.tensor.num_bytes} bytes"
        elif instr.num_chunks > 1:
            notes[index] = f"{instr.num_chunks} chunks"
    return notes
