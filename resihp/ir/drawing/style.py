"""How a picture looks: the style sheet, in a light and a dark form."""

from __future__ import annotations

from collections.abc import Iterable

from resihp.ir.drawing.colours import home_colour, ink_on, shade
from resihp.ir.model import Op

__all__ = ["HATCH", "box_class", "home_class", "style_sheet"]

_LIGHT = {
    "page": "#ffffff",
    "ink": "#15191e",
    "muted": "#5a6470",
    "track": "#eceff3",
    "grid": "#d5dae0",
    "phase": "#a7b0bb",
    "memory": "#c9c3dd",
    "memory-line": "#6b5ca5",
    "limit": "#c0392b",
    "warn": "#b3261e",
    "reduce": "#8b93a0",
    "update": "#6c7480",
    "step": "#15191e",
    "wire": "#15191e",
}
_DARK = {
    "page": "#14181d",
    "ink": "#e9edf2",
    "muted": "#a3adb9",
    "track": "#272d35",
    "grid": "#3a424c",
    "phase": "#5d6875",
    "memory": "#443c63",
    "memory-line": "#a99be0",
    "limit": "#ff8a80",
    "warn": "#ff8a80",
    "reduce": "#8b93a0",
    "update": "#6c7480",
    "step": "#e9edf2",
    "wire": "#e9edf2",
}
_CLOSING = ("reduce", "update")
_FILLED = ("page", "track", "memory", *_CLOSING)
_LINES = ("grid", "phase", "memory-line", "limit", "step", "wire")
_TEXTS = ("ink", "muted", "warn")

HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2" height="7" fill="#ffffff" '
    'fill-opacity="0.24"/></pattern>'
)
"""What lies over work that belongs to another replica."""


def box_class(op: Op, place: int) -> str:
    """The class of boxes of `op` at the stage that is `place` of its group."""
    return f"{op.name}{place}"


def home_class(home: int) -> str:
    """The class of the border of what belongs to `home`."""
    return f"of{home}"


def style_sheet(ops: Iterable[Op], num_places: int, homes: tuple[int, ...]) -> str:
    """Rules for a picture with these operations, stages per group and foreign homes."""
    rules = [
        "text{font-family:Helvetica,Arial,sans-serif;font-size:12px}",
        ".title{font-size:17px;font-weight:bold}",
        ".name{font-weight:bold}",
        ".small{font-size:10.5px}",
        ".tiny{font-size:9px}",
        ".middle{text-anchor:middle}",
        ".grid{stroke-width:1}",
        ".phase{stroke-width:1;fill:none}",
        ".step{stroke-width:2.5}",
        ".limit{stroke-width:1;stroke-dasharray:4 3}",
        ".memory-line{stroke-width:1;fill:none}",
        ".wire{stroke-width:0.8;stroke-opacity:0.45;fill:none}",
        ".hatch{fill:url(#hatch)}",
        *(f".on-{kind}{{fill:{ink_on(_LIGHT[kind])};text-anchor:middle}}" for kind in _CLOSING),
    ]
    for op in ops:
        for place in range(num_places):
            name, fill = box_class(op, place), shade(op, place, num_places)
            rules.append(f".{name}{{fill:{fill}}}")
            rules.append(f".on-{name}{{fill:{ink_on(fill)};text-anchor:middle}}")
    rules += [
        f".{home_class(home)}{{fill:none;stroke-width:2.5;stroke:{home_colour(home, homes)}}}"
        for home in homes
    ]
    dark = "".join(_paint(_DARK))
    return "".join([*rules, *_paint(_LIGHT), f"@media (prefers-color-scheme:dark){{{dark}}}"])


def _paint(colours: dict[str, str]) -> list[str]:
    return [
        *(f".{name}{{fill:{colours[name]}}}" for name in (*_FILLED, *_TEXTS)),
        *(f".{name}{{stroke:{colours[name]}}}" for name in _LINES),
    ]
