"""Plans run for real, one after the other, and what came of each.

Every rank has the interpreter of the executor, sockets and gloo groups; all are in one process,
which is killed after a hang or an error. A plan hangs if no rank moves for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from fleet import Fleet, FleetError, HangError
from torch import Tensor
from toy_model import reference_gradients, sizes_of, stacked
from toy_work import toy_crew

from resihp.ir.model import Plan

TOLERANCE = 1e-9
"""Of gradients, relative to the largest."""


class Outcome(NamedTuple):
    """What came of a plan."""

    verdict: str
    """`right`, `wrong` (another gradient, or none), `hang` or `error`."""
    detail: str = ""


class Runner:
    """Where plans are run. Use it in a `with`."""

    def __init__(self) -> None:
        self._fleet = Fleet(quiet=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.end()

    def run(self, plan: Plan, quiet_s: float = 1.0) -> Outcome:
        """Run `plan`; it hangs if nobody moves for `quiet_s`."""
        try:
            ended = self._fleet.run(plan, toy_crew, quiet_s=quiet_s)
        except HangError as hang:
            return Outcome("hang", str(hang))
        except FleetError as broke:
            return Outcome("error", str(broke))
        return _compared(plan, ended)


def _compared(plan: Plan, ended: Mapping[int, Mapping[int, list[float]]]) -> Outcome:
    """Whether all ranks stepped with the reference gradient."""
    reference = reference_gradients(sizes_of(plan), plan.model.layers)
    worst = 0.0
    placed = sorted({layers for group in plan.groups for layers in group.layers})
    for rank, gradients in ended.items():
        group = plan.group_of(rank)
        assert group is not None
        for layers in group.layers:
            found = gradients.get(placed.index(layers))
            if found is None:
                return Outcome("wrong", f"rank {rank} steps without gradients of {layers}")
            expected = stacked(reference[layers.first : layers.last + 1])
            worst = max(worst, _distance(torch.tensor(found, dtype=torch.float64), expected))
    return Outcome("right" if worst <= TOLERANCE else "wrong", f"off by {worst:.1e}")


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
