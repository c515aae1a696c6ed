"""The run without faults, and how far another run may be from it.

Where no TP degree can change, nowhere: bitwise. Elsewhere sums are added in another order, which
training then amplifies step by step. How much, a second run without faults shows that only adds in
another order (`numerics = "fast"`): it and a faulted run are roundings of one exact result. Once
those two are far apart, the next steps amplify by chance, and losses say nothing any more about a
third run: its hashes and samples do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["AMPLIFIED", "FLOOR", "MARGIN", "Reference", "Row", "difference", "reference_of"]

Row = Mapping[str, Any]
"""Of a file that a run leaves."""
FLOOR = 1e-6
"""Relative difference of a loss that rounding may make at once."""
MARGIN = 10.0
"""On the largest difference so far between the two runs without faults."""
AMPLIFIED = 1e-5
"""Where these two are further apart, losses are no longer compared."""


class Reference(NamedTuple):
    """By step, from 0."""

    losses: list[float | None]
    samples: list[list[int]]
    usual_s: float
    """What an iteration takes."""
    tolerance: list[float]
    """Largest relative difference of a loss; infinite where losses say nothing."""


def difference(loss: float | None, expected: float | None) -> float:
    """Relative; None is a loss that was not finite, or a step that is not there."""
    if loss is None or expected is None or not math.isfinite(loss):
        return 0.0 if loss == expected else math.inf
    return abs(loss - expected) / abs(expected)


def reference_of(
    metrics: Sequence[Row], ledger: Sequence[Row], reordered: Sequence[Row] | None
) -> Reference:
    """From what a run without faults left; `reordered` of one that adds in another order.

    None: every loss must have the bits of this one.
    """
    losses = [row["loss"] for row in metrics]
    seconds = sorted(float(row["iteration_s"]) for row in metrics)
    tolerance = [0.0] * len(losses)
    if reordered is not None:
        pairs = zip((row["loss"] for row in reordered), losses, strict=True)
        worst = itertools.accumulate((difference(*pair) for pair in pairs), max)
        tolerance = [math.inf if each > AMPLIFIED else FLOOR + MARGIN * each for each in worst]
    samples = [list(row["samples"]) for row in ledger]
    return Reference(losses, samples, seconds[len(seconds) // 2], tolerance)
