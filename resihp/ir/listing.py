"""One rank's program as a table: a line per instruction, with peers, chunks and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.ir.program import Program, ProgramInstr

__all__ = ["ListedInstr", "ListedTransfer", "Listing", "listing", "render_listing"]


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
    home: int | None = None
    """Logical replica that the micro-batch belongs to."""
    microbatch: int | None = None
    transfers: tuple[ListedTransfer, ...] = ()
    num_chunks: int | None = None
    """Chunks that a scatter cuts and a gather joins."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs in one iteration."""

    rank: int
    group: str
    tp: int
    tp_index: int
    layers: tuple[int, int]
    """First and last layer."""
    stage: int
    num_stages: int
    boundary_bytes: int
    """A whole activation between stages, or its gradient."""
    instrs: tuple[ListedInstr, ...]


def listing(program: Program, boundary_bytes: int) -> Listing:
    """`program` with sizes: `boundary_bytes` is that of its stage's facts."""
    return Listing(
        rank=program.rank,
        group=str(program.group),
        tp=program.tp,
        tp_index=program.tp_index,
        layers=program.sole_layers,
        stage=program.sole_stage,
        num_stages=program.num_stages,
        boundary_bytes=boundary_bytes,
        instrs=tuple(
            _instr(index, instr, boundary_bytes) for index, instr in enumerate(program.instrs)
        ),
    )


def _instr(index: int, instr: ProgramInstr, boundary_bytes: int) -> ListedInstr:
    cuts = not instr.transfers and instr.num_chunks > 1
    return ListedInstr(
        index=index,
        op=instr.op.mnemonic,
        home=instr.home,
        microbatch=instr.microbatch,
        transfers=tuple(
            ListedTransfer(
                peer=peer,
                chunk=chunk,
                num_chunks=num_chunks,
                num_bytes=boundary_bytes // num_chunks,
            )
            for peer, chunk, num_chunks in instr.transfers
        ),
        num_chunks=instr.num_chunks if cuts else None,
    )


def render_listing(listed: Listing) -> str:
    """The table. Micro-batches are written `number@home`, chunks `i/N`, bytes per message."""
    first, last = listed.layers
    head = (
        f"rank {listed.rank}: member {listed.tp_index} of {listed.tp} in {listed.group}, "
        f"layers {first}..{last}, stage {listed.stage} of {listed.num_stages}\n"
    )
    rows = [_row(instr) for instr in listed.instrs]
    return head + _aligned([("#", "instruction", "peers and chunks", "bytes each"), *rows])


def _row(instr: ListedInstr) -> tuple[str, str, str, str]:
    micro_batch = "" if instr.microbatch is None else f" {instr.microbatch}@{instr.home}"
    peers, size = "", ""
    if instr.transfers:
        arrow = "->" if instr.op.startswith("send") else "<-"
        peers = f"{arrow} " + ", ".join(map(_peer, instr.transfers))
        size = str(instr.transfers[0].num_bytes)
    elif instr.num_chunks is not None:
        peers = f"{instr.num_chunks} chunks"
    return str(instr.index), instr.op + micro_batch, peers, size


def _peer(transfer: ListedTransfer) -> str:
    chunk = "" if transfer.num_chunks == 1 else f" chunk {transfer.chunk}/{transfer.num_chunks}"
    return f"rank {transfer.peer}{chunk}"


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    number, words, peers, size = widths
    lines = (
        f"{a:>{number}}  {b:<{words}}  {c:<{peers}}  {d:>{size}}".rstrip() for a, b, c, d in rows
    )
    return "".join(f"{line}\n" for line in lines)
