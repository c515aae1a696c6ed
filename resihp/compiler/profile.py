"""Costs fitted to measurements: least squares of alpha * N + beta * sum(l^2), residuals told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.compiler.costs import Lengths, OpCost
from resihp.errors import UserError

__all__ = ["Fit", "fit", "fit_scale"]


class Fit(NamedTuple):
    """Coefficients and how well they explain what was measured."""

    cost: OpCost
    num_samples: int
    rms_error_s: float
    """Root of the mean squared residual."""
    mean_relative_error: float
    """Mean of |residual| / measured."""
    explained: float
    """R^2: 1 minus the residual's share of the variance; 1 where nothing varies."""


def fit(lengths: Sequence[Lengths], seconds: Sequence[float], *, attention: bool = True) -> Fit:
    """The non-negative alpha and beta that fit best; `attention` False leaves beta out (for W).

    Raises UserError for fewer samples than coefficients, or times that are not positive.
    """
    assert len(lengths) == len(seconds)
    if len(lengths) < 1 + attention:
        raise UserError(f"{len(lengths)} samples are too few to fit {1 + attention} coefficients")
    measured_s = _measured(seconds)
    features = np.asarray(lengths, dtype=np.float64)
    if not attention:
        features = features[:, :1]
    coefficients = _non_negative(features, measured_s)
    alpha, beta = float(coefficients[0]), float(coefficients[1]) if attention else 0.0
    return _judged(OpCost(alpha, beta), features @ coefficients, measured_s)


def fit_scale(cost: OpCost, lengths: Sequence[Lengths], seconds: Sequence[float]) -> Fit:
    """`cost` times the one factor that fits best: for samples that cannot tell alpha from beta.

    Raises UserError for times that are not positive.
    """
    assert 0 < len(lengths) == len(seconds)
    measured_s = _measured(seconds)
    predicted_s = np.array([cost.seconds(each) for each in lengths])
    factor = float(_along(predicted_s[:, None], measured_s, 0)[0])
    return _judged(cost.times(factor), factor * predicted_s, measured_s)


def _measured(seconds: Sequence[float]) -> NDArray[np.float64]:
    measured_s = np.asarray(seconds, dtype=np.float64)
    if not bool(np.all(np.isfinite(measured_s) & (measured_s > 0))):
        raise UserError("measured times must be positive numbers of seconds")
    return measured_s


def _judged(cost: OpCost, predicted_s: NDArray[np.float64], measured_s: NDArray[np.float64]) -> Fit:
    """A cost with its residuals."""
    residual_s = measured_s - predicted_s
    spread = float(np.sum((measured_s - measured_s.mean()) ** 2))
    return Fit(
        cost=cost,
        num_samples=len(measured_s),
        rms_error_s=float(np.sqrt(np.mean(residual_s**2))),
        mean_relative_error=float(np.mean(np.abs(residual_s) / measured_s)),
        explained=1.0 - float(np.sum(residual_s**2)) / spread if spread else 1.0,
    )


def _non_negative(
    features: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with coefficients of at least 0; exact for one or two of them."""
    num_columns = features.shape[1]
    best, error = np.zeros(num_columns), float(target @ target)
    candidates = [_along(features, target, column) for column in range(num_columns)]
    if num_columns == 2:
        candidates.append(_both(features, target))
    for candidate in candidates:
        residual = target - features @ candidate
        squares = float(residual @ residual)
        if np.all(candidate >= 0) and squares < error:
            best, error = candidate, squares
    return best


def _along(
    features: NDArray[np.float64], target: NDArray[np.float64], column: int
) -> NDArray[np.float64]:
    """The best solution with one coefficient."""
    values = features[:, column]
    squares = float(values @ values)
    solution = np.zeros(features.shape[1])
    solution[column] = float(values @ target) / squares if squares else 0.0
    return solution


def _both(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best solution with two coefficients; zeros where the columns are parallel."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    first, second = (features / scale).T
    a, b, c = float(first @ first), float(first @ second), float(second @ second)
    determinant = a * c - b * b
    if determinant <= 1e-12 * a * c:
        return np.zeros(2)
    p, q = float(first @ target), float(second @ target)
    return np.array([c * p - b * q, a * q - b * p]) / determinant / scale
