"""What a rank holds between iterations: parameters, moments, and the transaction around a step.

`version` counts completed steps. A step completes in two moves: `vote_complete` once every
member's contribution is here, `apply` when the parameters have changed. The reduced gradients
are kept until then, so a rank that saw the vote but did not apply, or did not even see it, can
still roll forward to what the others did (DESIGN §6).

With snapshots every version that is due is copied to shared memory while the next step computes
(the record of the step before says which, so that all members keep the same, late ones as well);
`seal` waits for that before this rank votes. A rank can go back to its own snapshot, and one that
was started again can begin from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from resihp.config import JobConfig
from resihp.errors import CommError, UserError
from resihp.executor.adamw import AdamW, AdamWConfig, learning_rate
from resihp.executor.boundary import Agreement
from resihp.executor.flat import bytes_of
from resihp.executor.held import Held
from resihp.executor.init import initial_parameters
from resihp.executor.layouts import slice_of
from resihp.executor.model import Model, shapes_of, tensors_of
from resihp.executor.snapshots.cadence import Cost
from resihp.executor.snapshots.format import NUM_KINDS, Manifest
from resihp.executor.snapshots.reader import Snapshot
from resihp.executor.snapshots.writer import Snapshots, manifest_of
from resihp.executor.stream import Event
from resihp.ir.program import Program
from resihp.ir.reshard import chunks_of_member
from resihp.wire.messages import Commit, HeldSums, Sealed, StepRecord

__all__ = [
    "Holding",
    "TrainState",
    "clip_scale",
    "empty_optimizer",
    "fill",
    "holding_of",
    "initial_holding",
    "shard_hashes",
]


class Holding(NamedTuple):
    """A rank's shards of all its stages in one layout, with their optimizer."""

    program: Program
    optimizer: AdamW
    working: dict[str, Tensor]
    """What F and B read: the parameters themselves, or bf16 copies of them."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Shards by name, fp32: what the optimizer updates and what moves."""
        return self.optimizer.parameters

    def kinds(self) -> tuple[Mapping[str, Tensor], ...]:
        """Everything that moves with a shard: parameters and both moments."""
        optimizer = self.optimizer
        return optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq

    def refresh(self) -> None:
        """Make the working copies anew after an update; they stay the same tensors."""
        for name, parameter in self.parameters.items():
            if self.working[name] is not parameter:
                self.working[name].copy_(parameter)


def holding_of(program: Program, optimizer: AdamW) -> Holding:
    """`optimizer` holds the shards of `program`'s layers; working copies are of its precision."""
    parameters = optimizer.parameters
    if program.precision == "fp32":
        return Holding(program, optimizer, dict(parameters))
    working = {name: parameter.to(torch.bfloat16) for name, parameter in parameters.items()}
    return Holding(program, optimizer, working)


def initial_holding(
    model: Model, job: JobConfig, program: Program, device: torch.device | str = "cpu"
) -> Holding:
    """The untrained shards of `program`'s layers; the same logical model in every layout."""
    names = tensors_of(model, program.layers)
    parameters = initial_parameters(
        model, names, job.job.seed, degree=program.tp, index=program.tp_index, device=device
    )
    return holding_of(program, AdamW(job.optimizer, parameters))


def empty_optimizer(
    model: Model, config: AdamWConfig, program: Program, device: torch.device | str = "cpu"
) -> AdamW:
    """Memory for the shards of `program`'s layers and their moments."""
    # NaN, so that a piece that nobody filled in can never pass for state.
    parameters, exp_avg, exp_avg_sq = (
        {
            name: torch.full(shape, float("nan"), device=device)
            for name, shape in shapes_of(model, program).items()
        }
        for _ in range(NUM_KINDS)
    )
    return AdamW(config, parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def clip_scale(grad_norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`."""
    return min(1.0, max_norm / (grad_norm + 1e-6))


class TrainState:
    """The state of one rank over all generations.

    `current` is the holding of generation `layout`; `pending` one that is complete but not yet
    in use, because its generation has not been told to go.
    """

    def __init__(self, job: JobConfig, snapshots: Snapshots | None = None) -> None:
        self._job = job
        self.snapshots = snapshots
        self.agreement = Agreement()
        self.layout: int = 0
        self.current: Holding | None = None
        self.pending: tuple[int, Holding | None] | None = None
        self.version: int = 0
        self.updates: int = 0
        self.voted: int = 0
        self.record: StepRecord | None = None
        self.reduced: dict[str, Tensor] | None = None
        self.held: Held | None = None
        """What is complete of the interrupted iteration `version` in the layout `layout`, until
        that is redone: another layout has other shards."""

    @property
    def layouts(self) -> tuple[int, ...]:
        """Generations whose layout this rank can continue from."""
        return (self.layout, self.pending[0]) if self.pending is not None else (self.layout,)

    def sealed(self) -> tuple[Sealed, ...]:
        """The snapshots in the memory of this node. Waits for one that is being written."""
        return () if self.snapshots is None else self.snapshots.sealed()

    def report_held(self) -> tuple[int, int, tuple[HeldSums, ...]]:
        """The interrupted iteration of which something is complete here (-1: none), the generation
        whose layout that has, and what it is."""
        if self.held is None or self.held.step != self.version:
            return -1, self.layout, ()
        return self.held.step, self.layout, self.held.report(self._job.batch.microbatches)

    # --- a step

    def seal(self) -> None:
        """Wait until the snapshot of the version before this step is complete, where one is due.

        Comes before this rank's contribution to the vote: whoever sees a vote complete knows then
        that all members can go back to the version before.
        """
        if self.snapshots is not None:
            self.snapshots.finish_copy()

    def snapshot_gap(self, step: Cost) -> int:
        """How many steps are to lie between two snapshots, after a step of that cost; 0: none."""
        return self.snapshots.gap(step) if self.snapshots is not None else 0

    def is_snapshot_due(self, gap: int) -> bool:
        """Whether the version after this step is to be kept, where all agreed on `gap`."""
        return self.snapshots is not None and self.snapshots.is_due(self.version + 1, gap)

    def reduce_complete(self, reduced: dict[str, Tensor]) -> None:
        """The gradients of step `version` are complete on this rank."""
        assert self.version == self.voted, "a new step before the last one was applied"
        self.reduced = reduced

    def vote_complete(self, record: StepRecord) -> None:
        """All members contributed to the vote of `record.step`."""
        assert record.step == self.version
        self.voted = record.step + 1
        self.record = record

    def apply(self) -> None:
        """Complete the voted step: update the parameters, or skip as all others do."""
        if self.snapshots is not None:
            self.snapshots.finish()
        record = self.record
        assert record is not None
        assert record.step == self.version
        assert self.voted == self.version + 1
        if not record.skipped:
            assert self.current is not None
            assert self.reduced is not None
            scale = clip_scale(record.grad_norm, self._job.optimizer.grad_clip)
            self.current.optimizer.step(self.reduced, record.learning_rate, scale)
            self.current.refresh()
            self.updates += 1
        self.reduced = None
        self.version += 1
        snapshots = self.snapshots
        if snapshots is not None and self.current is not None and record.snapshot:
            manifest = self._manifest(snapshots, self.layout, self.current)
            snapshots.begin(manifest, self.current.kinds())

    def _manifest(self, snapshots: Snapshots, generation: int, holding: Holding) -> Manifest:
        version, updates = self.version, self.updates
        return manifest_of(snapshots.rank, generation, version, updates, holding.parameters)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from the job file."""
        optimizer = self._job.optimizer
        return learning_rate(
            step,
            peak=optimizer.lr,
            floor=optimizer.lr * optimizer.min_lr_ratio,
            num_warmup_steps=optimizer.warmup_steps,
            num_steps=self._job.job.steps,
        )

    # --- between generations

    def forget(self) -> None:
        """Hold nothing: this rank was lost to the others, or all go back to a saved version."""
        self.layout, self.current, self.pending, self.reduced = 0, None, None, None
        self.held = None

    def adopt(
        self, base: int, commit: Commit, room: Callable[[], Holding | None] | None = None
    ) -> None:
        """Continue from the layout of generation `base`, at `commit.version`.

        A rank that is one step behind rolls forward with the gradients that it kept, one that is
        ahead goes back to its own snapshot. One that holds nothing, because it was started again,
        begins from its snapshot where there is one: `room` makes the holding of this rank in that
        layout, with whatever numbers (None: it had no place there). Who holds nothing then
        (standby) only takes over the numbers. CommError where the snapshot that is needed is not
        whole.
        """
        if self.pending is not None and self.pending[0] == base:
            self.layout, self.current = self.pending
            self.held = None
        self.pending = None
        if self.snapshots is not None:
            self.snapshots.settle(base, commit.version)
        if self.current is None:
            self._begin_from_snapshot(base, commit, room)
        assert self.layout == base or self.current is None, f"no layout of generation {base} here"
        if self.current is None:
            self._take_numbers(commit)
        elif self.version > commit.version:
            self._go_back(base, commit, self.current)
        elif self.version < commit.version:
            self._roll_forward(commit)
        elif self.voted > commit.version:  # nobody else can follow this vote any more
            self._take_numbers(commit)
        if self.held is not None and self.held.step != commit.version:
            self.held = None
        settled = (commit.version, commit.version, commit.updates)
        assert (self.version, self.voted, self.updates) == settled

    def _take_numbers(self, commit: Commit) -> None:
        self.version = self.voted = commit.version
        self.updates, self.record = commit.updates, commit.record
        self.reduced = None

    def _roll_forward(self, commit: Commit) -> None:
        assert self.version + 1 == commit.version
        assert commit.record is not None
        assert self.reduced is not None, "asked to roll forward without gradients"
        if self.voted == self.version:
            self.vote_complete(commit.record)
        self.apply()

    def _go_back(self, base: int, commit: Commit, holding: Holding) -> None:
        snapshot = self._own_snapshot(base, commit.version)
        if snapshot is None:
            raise CommError(f"no snapshot of version {commit.version} here to go back to")
        fill(holding, snapshot)
        self._take_numbers(commit)

    def _begin_from_snapshot(
        self, base: int, commit: Commit, room: Callable[[], Holding | None] | None
    ) -> None:
        snapshot = self._own_snapshot(base, commit.version)
        holding = None if snapshot is None or room is None else room()
        if snapshot is not None and holding is not None:
            fill(holding, snapshot)
            self.layout, self.current = base, holding
            self._take_numbers(commit)

    def _own_snapshot(self, base: int, version: int) -> Snapshot | None:
        snapshots = self.snapshots
        if snapshots is None:
            return None
        return snapshots.open(snapshots.rank, generation=base, version=version)

    def prepare(self, generation: int, holding: Holding | None) -> None:
        """`holding` is complete; it replaces the current one at `go`.

        Its optimizer gets our number of updates: a rank that was standby received moments, but
        knows the number, on which their bias correction depends, from the commit only.
        """
        if holding is not None:
            holding.optimizer.num_steps = self.updates
        self.pending = (generation, holding)

    def secure(self) -> tuple[Manifest, Event] | None:
        """Seal a snapshot of the prepared layout, before anybody counts on it, and return it.

        UserError where this node has no memory for it and the job begins; later such a rank goes
        on without.
        """
        snapshots = self.snapshots
        assert self.pending is not None
        generation, holding = self.pending
        if snapshots is None or holding is None:
            return None
        snapshots.allow()
        manifest = self._manifest(snapshots, generation, holding)
        try:
            snapshots.reserve(manifest)
        except OSError as error:
            if self.layout == 0:
                raise UserError(snapshots.why_not(error), key="state.snapshot_every") from error
            snapshots.refuse(error)
        snapshots.begin(manifest, holding.kinds())
        return manifest, snapshots.written()

    def go(self, held: Held | None = None) -> None:
        """Use the prepared holding and let the old layout go; `held` is what the iteration that is
        redone begins with."""
        assert self.pending is not None
        self.layout, self.current = self.pending
        self.pending = None
        self.reduced = None
        self.held = held
        if self.snapshots is not None and self.current is None:
            self.snapshots.forget()


def fill(holding: Holding, snapshot: Snapshot) -> None:
    """Make `holding` what the snapshot has. CommError where that is of another layout."""
    for target, source in zip(holding.kinds(), snapshot.kinds, strict=True):
        shapes = {name: tensor.shape for name, tensor in source.items()}
        if shapes != {name: tensor.shape for name, tensor in target.items()}:
            raise CommError("a snapshot does not fit the layout that it names")
    for target, source in zip(holding.kinds(), snapshot.kinds, strict=True):
        for name, tensor in target.items():
            tensor.copy_(source[name])
    holding.optimizer.num_steps = snapshot.manifest.updates
    holding.refresh()


def shard_hashes(model: Model, holding: Holding, num_chunks: int) -> dict[str, str]:
    """SHA-256 of parameters and moments, per layer and chunk, comparable between TP layouts."""
    program = holding.program
    chunks = chunks_of_member(program.tp_index, program.tp, num_chunks)
    hashes: dict[str, str] = {}
    for layer in (layer for first, last in program.layers for layer in range(first, last + 1)):
        names = sorted(model.tensors(layer, layer))
        whole = [name for name in names if model.layout(name).dim is None]
        cut = [name for name in names if model.layout(name).dim is not None]
        hashes[f"layer {layer} replicated"] = _digest(
            kind[name] for name in whole for kind in holding.kinds()
        )
        for chunk in chunks:
            hashes[f"layer {layer} shard {chunk}/{num_chunks}"] = _digest(
                slice_of(
                    model.layout(name),
                    kind[name],
                    chunk,
                    num_chunks,
                    program.tp,
                    program.tp_index,
                )
                for name in cut
                for kind in holding.kinds()
            )
    return hashes


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()
