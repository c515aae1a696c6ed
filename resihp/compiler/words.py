"""Times and rates in words."""

from __future__ import annotations

__all__ = ["spell_number", "spell_rate", "spell_seconds"]


def spell_seconds(value: float) -> str:
    """A time that reads well: `20,570 s`, `1.234 s`, `56.7 ms`."""
    if value >= 1:
        return f"{spell_number(value)} s"
    return f"{value * 1e3:.4g} ms" if value >= 1e-3 else f"{value * 1e6:.4g} us"


def spell_rate(value: float) -> str:
    """Such as tokens a second: `24,812`, `3.12`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spell_number(value: float) -> str:
    """With four digits or more: `20,570`, `1.234`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
