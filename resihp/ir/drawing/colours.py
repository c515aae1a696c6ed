"""Colours of pictures: blue forwards and green backwards, as the papers of the field draw them.

Told apart by lightness too, so that they differ for the colour-blind and in print. All are of
Okabe and Ito's kind of palette: blue, bluish green, orange, purple.
"""

from __future__ import annotations

from collections.abc import Mapping

from resihp.ir.model import Op

__all__ = ["DARK", "FILLS", "HOMES", "LIGHT", "contrast", "home_colour", "ink_on", "shade"]

FILLS: Mapping[Op, str] = {
    Op.F: "#2f6fb4",
    Op.B: "#35b597",
    Op.W: "#efb73e",
    Op.BW: "#17795e",
}
"""Of the first stage of a group; later ones are lighter (`shade`)."""

HOMES = ("#d1495b", "#8e44ad", "#b8860b", "#1f9fd6", "#5d6d7e", "#d35400")
"""Borders of work that belongs to another replica, one after the other."""

DARK, LIGHT = "#101418", "#ffffff"
_LIGHTEST = 0.55
"""How far the last stage of a group is from its colour towards white."""


def shade(op: Op, place: int, num_places: int) -> str:
    """The colour of `op` at the stage that is `place` of the `num_places` of its group."""
    share = _LIGHTEST * place / (num_places - 1) if num_places > 1 else 0.0
    mixed = (round(part + (255 - part) * share) for part in _parts(FILLS[op]))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def home_colour(home: int, homes: tuple[int, ...]) -> str:
    """The border of micro-batches of `home`, one of the foreign `homes` of a picture."""
    return HOMES[homes.index(home) % len(HOMES)]


def ink_on(fill: str) -> str:
    """Black or white, whichever is read better on `fill`."""
    return max((LIGHT, DARK), key=lambda ink: contrast(ink, fill))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21, as WCAG 2 defines it."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in _parts(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
