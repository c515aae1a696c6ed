"""What ranks held in the layout before, where it is not in their memory any more."""

from __future__ import annotations

import torch

from resihp.config import JobConfig
from resihp.errors import CommError
from resihp.executor.adamw import AdamW
from resihp.executor.model import Model, shapes_of
from resihp.executor.snapshots.writer import Snapshots
from resihp.executor.state import Holding, empty_optimizer, holding_of
from resihp.ir.expand import expand
from resihp.ir.parser import parse

__all__ = ["Before"]


class Before:
    """The layout that a generation begins from, as `rank` sees it."""

    def __init__(
        self,
        model: Model,
        job: JobConfig,
        previous_plan: str | None,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """`previous_plan` as text; None: nothing was before."""
        self._model = model
        self._job = job
        self._rank = rank
        self._device = device
        self.plan = None if previous_plan is None else parse(previous_plan).plan

    def room(self) -> Holding | None:
        """Memory for what this rank held, None where it had no place."""
        if self.plan is None or self._rank not in self.plan.active_ranks:
            return None
        program = expand(self.plan, self._rank)
        return holding_of(
            program, empty_optimizer(self._model, self._job.optimizer, program, self._device)
        )

    def lost(
        self, snapshots: Snapshots | None, generation: int, version: int, rank: int
    ) -> Holding:
        """What `rank` held, as its snapshot has it: views of the file, on the CPU.

        CommError where there is no whole one of that generation and version.
        """
        assert self.plan is not None
        program = expand(self.plan, rank)
        found = None
        if snapshots is not None:
            found = snapshots.open(rank, generation=generation, version=version)
        if found is None or dict(found.manifest.tensors) != shapes_of(self._model, program):
            raise CommError(f"no whole snapshot of rank {rank} at version {version} here")
        parameters, exp_avg, exp_avg_sq = found.kinds
        optimizer = AdamW(self._job.optimizer, parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        return Holding(program, optimizer, {})
