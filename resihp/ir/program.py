"""What one rank runs in one iteration, with peers, chunks and tensor types resolved."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from resihp.ir.model import (
    FORMAT_VERSION,
    Batch,
    GroupName,
    Instr,
    LayerRange,
    Mesh,
    ModelShape,
    Op,
    Plan,
    Precision,
)

__all__ = [
    "ELEMENT_BYTES",
    "Program",
    "ProgramInstr",
    "TensorType",
    "Transfer",
    "boundary_type",
]

ELEMENT_BYTES = {"f32": 4, "bf16": 2}
"""Element types that cross stages, with their size."""
_ELEMENT: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16"}


class Transfer(NamedTuple):
    """One message of a send or receive: this member's chunk `chunk` of `num_chunks`."""

    peer: int
    """Global rank at the other end."""
    chunk: int
    num_chunks: int


class TensorType(NamedTuple):
    """What one message holds, written `128x256xf32`."""

    tokens: int
    hidden: int
    element: str = "f32"

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.element}"

    @property
    def num_bytes(self) -> int:
        """Size of one message."""
        return self.tokens * self.hidden * ELEMENT_BYTES[self.element]


class ProgramInstr(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One instruction of one rank."""

    op: Op
    microbatch: int | None = None
    """Number at home; None where the operation has none."""
    home: int | None = None
    """Logical replica that the micro-batch belongs to; always given where `microbatch` is."""
    stage: int | None = None
    """Number in the whole model; None for STEP."""
    paired: bool = False
    """Computed overlapped with the next instruction."""
    transfers: tuple[Transfer, ...] = ()
    """Messages of a send or receive in chunk order; empty for other operations."""
    tensor: TensorType | None = None
    """Of each message of a send or receive."""
    num_chunks: int = 1
    """Chunks of the whole tensor for scatter, gather, send and receive; 1: not cut."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs in one iteration.

    Without the instructions it says enough of the job to be checked alone and to be put together
    with the programs of the other ranks.
    """

    model: ModelShape
    mesh: Mesh
    batch: Batch
    rank: int
    group: GroupName
    tp_index: int
    """Which member of the group the rank is."""
    tp: int
    layers: tuple[LayerRange, ...]
    """One range per stage."""
    stages: tuple[int, ...]
    """Their numbers in the whole model, ascending."""
    num_stages: int
    """Stages of the whole model."""
    instrs: tuple[ProgramInstr, ...]
    precision: Precision = "fp32"
    recompute: tuple[int, ...] = ()
    """Stages of the whole model that compute their forward again in B."""
    version: int = FORMAT_VERSION

    def written(self, index: int) -> Instr:
        """Instruction `index` as the stream of its group has it: defaults are left out."""
        instr = self.instrs[index]
        home = None if instr.home == self.group.replica else instr.home
        stage = None if len(self.stages) == 1 else instr.stage
        return Instr(instr.op, instr.microbatch, home, stage)

    @property
    def send_targets(self) -> frozenset[int]:
        """Ranks that it sends activations or gradients to."""
        sends = (instr for instr in self.instrs if instr.op.is_send)
        return frozenset(transfer.peer for instr in sends for transfer in instr.transfers)

    @property
    def sole_layers(self) -> LayerRange:
        """The layers of a program that runs one stage; for code that knows no others."""
        assert len(self.layers) == 1, f"rank {self.rank} runs {len(self.layers)} stages"
        return self.layers[0]


def boundary_type(job: Plan | Program, num_chunks: int = 1) -> TensorType:
    """What crosses stages, whole or as one of `num_chunks` chunks along its tokens."""
    element = _ELEMENT[job.precision]
    return TensorType(job.batch.tokens // num_chunks, job.model.hidden, element)
