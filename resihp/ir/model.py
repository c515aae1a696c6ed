"""The plan as data: what every other part of ResiHP reads and writes.

A `Plan` says, for each (replica, position in the pipeline), which ranks hold which layers and in
which order they compute, communicate, reduce and step. One `Stream` is the order of one position;
replicas whose order is the same share it. All members of a tensor-parallel (TP) group run the
same stream.

A group holds one contiguous range of layers for each of its pipeline **stages**. Stages are
numbered through the whole model in the order of their layers, so the layers alone say where each
stage is placed: one per position, looped, in V shape or uneven (`resihp.ir.placement`).

Positions in a text are not part of a plan (`parse(print(p)) == p`); they live in
`resihp.ir.source`.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

import msgspec

__all__ = [
    "FORMAT_VERSION",
    "Batch",
    "Group",
    "GroupName",
    "Instr",
    "LayerRange",
    "Level",
    "Load",
    "Mesh",
    "MicroBatch",
    "ModelShape",
    "Move",
    "Op",
    "Plan",
    "Precision",
    "Reshard",
    "Restore",
    "Resume",
    "Source",
    "Stream",
]

FORMAT_VERSION = 1

Precision = Literal["fp32", "bf16"]
"""Of parameters, activations and what crosses stages; `resihp.compiler.facts` tells the rest."""


class Op(enum.IntEnum):
    """One kind of instruction. The text form is `Op.mnemonic`."""

    F = 0
    """Forward of one micro-batch; on the last stage it includes the loss."""
    B = 1
    """Activation gradient (torch's CSV calls it I)."""
    W = 2
    """Weight gradient (its inputs are kept alive from B to W)."""
    BW = 3
    """B and W fused (torch's CSV calls it B)."""
    SCATTER_ACT = 4
    """Cut the activation into max(TP here, TP there) chunks; each member owes its own."""
    SEND_ACT = 5
    """Post the activation, or this member's chunks of it, to the next stage."""
    RECV_ACT = 6
    """Receive the activation, or this member's chunks of it, from the previous stage."""
    GATHER_ACT = 7
    """All-gather received activation chunks inside the receiving TP group."""
    SCATTER_GRAD = 8
    SEND_GRAD = 9
    """Post the gradient of the input activation to the previous stage."""
    RECV_GRAD = 10
    """Receive the gradient of the output activation from the next stage."""
    GATHER_GRAD = 11
    REDUCE_GRADS = 12
    """Sum weight gradients over the replicas that hold this stage's layers."""
    STEP = 13
    """Vote (norms, finite) with all ranks, then update the parameters."""
    GATHER_PARAMS = 14
    """Gather the parameters of a stage where data parallelism shards them (torch: UNSHARD)."""
    FREE_PARAMS = 15
    """Give the gathered parameters back (torch: RESHARD)."""

    @property
    def mnemonic(self) -> str:
        """How the operation is written in a plan."""
        return _MNEMONIC[self]

    @property
    def has_micro_batch(self) -> bool:
        """Whether the instruction names a micro-batch."""
        return self < Op.REDUCE_GRADS

    @property
    def has_stage(self) -> bool:
        """Whether the instruction belongs to one stage."""
        return self is not Op.STEP

    @property
    def is_compute(self) -> bool:
        """F, B, W or BW."""
        return self <= Op.BW

    @property
    def is_send(self) -> bool:
        """Of an activation or a gradient."""
        return self is Op.SEND_ACT or self is Op.SEND_GRAD

    @property
    def is_receive(self) -> bool:
        """Of an activation or a gradient."""
        return self is Op.RECV_ACT or self is Op.RECV_GRAD

    @property
    def is_gather(self) -> bool:
        """Of the chunks of an activation or a gradient."""
        return self is Op.GATHER_ACT or self is Op.GATHER_GRAD

    @property
    def is_transfer(self) -> bool:
        """A send or a receive."""
        return self in _TRANSFERS


_TRANSFERS = frozenset((Op.SEND_ACT, Op.RECV_ACT, Op.SEND_GRAD, Op.RECV_GRAD))
_MNEMONIC = {op: op.name if op <= Op.BW else op.name.lower() for op in Op}


class GroupName(NamedTuple):
    """Logical place of a TP group, written `dp0.pp1`."""

    replica: int
    pp: int
    """Position in the pipeline: which of the `mesh.pp` groups of the replica."""

    def __str__(self) -> str:
        return f"dp{self.replica}.pp{self.pp}"


class LayerRange(NamedTuple):
    """Decoder layers `first..last`, both included.

    The embedding goes with layer 0, the final norm and the head with the last layer.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must know of the model: enough for shape, head and memory checks."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """The healthy layout: TP degree, number of stages, number of logical replicas.

    Ranks are numbered 0 .. tp*pp*dp - 1, TP fastest, then stage, then replica.
    A reconfigured plan keeps the mesh line and shows in its groups what is left.
    """

    tp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        """Number of ranks in the healthy job."""
        return self.tp * self.pp * self.dp


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-batches per logical replica and tokens per micro-batch."""

    microbatches: int
    tokens: int


class MicroBatch(NamedTuple):
    """A micro-batch of the global batch, written `number@home`, or `number` where home is 0."""

    home: int
    """The logical replica that it belongs to."""
    number: int

    def __str__(self) -> str:
        return f"{self.number}@{self.home}" if self.home else str(self.number)


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan redoes the interrupted iteration `step`, but for the micro-batches in `keep`.

    Their gradients are complete at every stage, on the groups that computed them; no stream runs
    them again.
    """

    step: int
    keep: tuple[MicroBatch, ...] = ()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A TP group: member `i` of `ranks` holds shard `i` of `len(ranks)` of `layers`.

    `layers` has one range per stage that the group runs, in ascending order.
    """

    replica: int
    pp: int
    ranks: tuple[int, ...]
    layers: tuple[LayerRange, ...]

    @property
    def name(self) -> GroupName:
        """Where the group stands."""
        return GroupName(self.replica, self.pp)

    @property
    def tp(self) -> int:
        """TP degree."""
        return len(self.ranks)

    @property
    def sole_layers(self) -> LayerRange:
        """The layers of a group that runs one stage; for code that knows no others."""
        assert len(self.layers) == 1, f"{self.name} runs {len(self.layers)} stages"
        return self.layers[0]


class Reshard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Shards of `layers` that members of `target` lack come from `source`.

    `source` is a group of the plan before, `target` a group of this plan. What a member of
    `target` already holds stays where it is.
    """

    layers: LayerRange
    source: GroupName
    target: GroupName


class Move(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank `target` takes over, unchanged, what rank `source` held of `layers`.

    Both ranks are the same member of groups of the same TP degree: `source` in the plan before,
    `target` in this plan.
    """

    layers: LayerRange
    source: int
    target: int


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What members of `target` lack of `layers` comes out of a snapshot of rank `source`.

    `source` held it in the plan before, and the process that had it is gone. `giver` is a live
    rank that can read the snapshot: it lies in the memory of its node.
    """

    layers: LayerRange
    source: int
    giver: int
    target: GroupName


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What members of `target` lack of `layers` is read from the complete saved version `step`."""

    layers: LayerRange
    step: int
    target: GroupName


Source = Reshard | Move | Restore | Load
"""A line of the reconfigure block: where state comes from that a rank did not hold before."""


class Instr(msgspec.Struct, frozen=True, gc=False):
    """One instruction of a stream.

    `microbatch` is the number at home, `home` the logical replica it belongs to (None: the
    replica that runs the stream). Both are None for operations without a micro-batch. `stage` is
    None exactly where the group runs one stage (and for STEP). `peer` is the replica at the other
    end of a send or receive (None: the replica that runs the stream). With `paired` the
    instruction and the next one are computed overlapped: both start once the inputs of both are
    there.
    """

    op: Op
    microbatch: int | None = None
    home: int | None = None
    stage: int | None = None
    peer: int | None = None
    paired: bool = False


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The order of work at position `pp` of the pipeline in each of `replicas`."""

    replicas: tuple[int, ...]
    pp: int
    body: tuple[Instr, ...]


class Level(enum.StrEnum):
    """How much a text says."""

    SCHEDULE = "schedule"
    """Only the order of F, B, W and BW; `resihp lower` adds the rest."""
    PLAN = "plan"
    """Everything that the groups run."""
    PROGRAM = "program"
    """What one rank runs; not a `Plan` but a `resihp.ir.expand.Program`."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole plan, or schedule. Nothing here is verified: `resihp.ir.verify` does that.

    `memory_bytes` is the capacity of one device (None: memory is not checked). `transport` is
    what progress is to be proved under (None: `edge`), as `resihp.ir.transport` spells it.
    """

    model: ModelShape
    mesh: Mesh
    batch: Batch
    groups: tuple[Group, ...]
    streams: tuple[Stream, ...]
    schedule: str | None = None
    memory_bytes: int | None = None
    resume: Resume | None = None
    standby: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    reconfigure: tuple[Source, ...] = ()
    transport: str | None = None
    precision: Precision = "fp32"
    recompute: tuple[int, ...] = ()
    """Stages, ascending, that keep only their input in F and compute the rest again in B."""
    level: Level = Level.PLAN
    version: int = FORMAT_VERSION

    def group(self, replica: int, stage: int) -> Group | None:
        """The group at (replica, stage), None where the replica lacks the stage."""
        return next((g for g in self.groups if (g.replica, g.pp) == (replica, stage)), None)

    def group_of(self, rank: int) -> Group | None:
        """The group that `rank` is a member of, None for standby and lost ranks."""
        return next((g for g in self.groups if rank in g.ranks), None)

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """The `reshard` lines of the reconfigure block."""
        return tuple(line for line in self.reconfigure if isinstance(line, Reshard))

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """Ranks that are members of a group, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group.ranks))
