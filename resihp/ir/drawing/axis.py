"""Time in words and on an axis."""

from __future__ import annotations

import math
from typing import NamedTuple

from resihp.ir.drawing.scene import Clock

__all__ = ["Axis", "axis_of", "spell_time"]

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_STEPS = (1, 2, 5, 10)


class Axis(NamedTuple):
    """Where ticks are, and what stands at them."""

    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    unit: str
    """Of the labels."""


def axis_of(length: float, clock: Clock, num_ticks: int) -> Axis:
    """About `num_ticks` round times from 0 to `length`."""
    scale, unit = _scale(length, clock)
    span = length / scale if length > 0 else 1.0
    rough = span / max(num_ticks, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _STEPS if power * each >= rough * (1 - 1e-9))
    if clock.unit == "unit":
        step = max(1.0, step)
    count = math.floor(span / step + 1e-9)
    marks = [number * step for number in range(count + 1)]
    return Axis(tuple(mark * scale for mark in marks), tuple(f"{m:g}" for m in marks), unit)


def spell_time(time: float, clock: Clock) -> str:
    """`1.234 s`, `12.3 ms`, `33 units`."""
    scale, unit = _scale(time, clock)
    value = time / scale
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {'unit' if unit == 'units' and number == '1' else unit}"


def _scale(length: float, clock: Clock) -> tuple[float, str]:
    if clock.unit == "unit":
        return 1.0, "units"
    return next((each for each in _SCALES if length >= each[0]), _SCALES[-1 if length else 0])
