"""What the colours and lines of an SVG picture mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from resihp.ir.drawing.frame import LABEL_WIDTH, SIDE_WIDTH, text_width
from resihp.ir.drawing.scene import Scene
from resihp.ir.drawing.style import box_class, home_class
from resihp.ir.drawing.xml import element, text_of
from resihp.ir.model import Op

__all__ = ["LINE", "Legend", "draw_legend", "legend_of"]

LINE = 20
_SWATCH, _HEIGHT = 20, 12
_MOST_HOMES = 8
_MEANINGS = {
    Op.F: "F forward",
    Op.B: "B activation gradient",
    Op.W: "W weight gradient",
    Op.BW: "BW both gradients",
}


class Item(NamedTuple):
    """A swatch and its meaning. `kinds` are the classes that lie over each other."""

    kinds: tuple[str, ...]
    text: str


class Legend(NamedTuple):
    """Items, line by line."""

    lines: tuple[tuple[Item, ...], ...]

    @property
    def num_lines(self) -> int:
        """How many it takes."""
        return len(self.lines)


def legend_of(scene: Scene, plot: float, *, wires: bool = False) -> Legend:
    """As many lines as fit above a plot `plot` pixels wide."""
    room = LABEL_WIDTH + plot + SIDE_WIDTH
    lines: list[list[Item]] = [[]]
    used = 0.0
    for item in _items(scene, wires=wires):
        width = _width(item)
        if lines[-1] and used + width > room:
            lines.append([])
            used = 0.0
        lines[-1].append(item)
        used += width
    return Legend(tuple(map(tuple, lines)))


def _items(scene: Scene, *, wires: bool) -> Iterator[Item]:
    rows = list(scene.rows)
    boxes = [box for row in rows for box in row.boxes]
    ops = sorted({box.op for box in boxes})
    num_places = max((len(row.stages) for row in rows), default=1)
    for op in ops:
        yield Item((box_class(op, 0),), _MEANINGS[op])
    if num_places > 1 and ops:
        yield Item((box_class(ops[0], num_places - 1),), "lighter: later stage of the group")
    if any(box.half for box in boxes):
        yield Item(("upper", "lower"), "overlapped pair")
    yield Item(("track",), "idle")
    homes = scene.homes
    for home in homes[:_MOST_HOMES]:
        over = box_class(ops[0], 0)
        yield Item((over, "hatch", home_class(home)), f"of replica {home}")
    if len(homes) > _MOST_HOMES:
        yield Item((), f"and of {len(homes) - _MOST_HOMES} other replicas")
    marked = {mark.op for row in rows for mark in row.marks}
    if Op.REDUCE_GRADS in marked:
        yield Item(("reduce",), "reduce gradients")
    if Op.STEP in marked:
        yield Item(("step",), "step")
    if any(row.memory is not None for row in rows):
        yield Item(("memory",), "memory of one rank beyond its state")
    if wires:
        yield Item(("wire",), "transfer")


def _width(item: Item) -> float:
    return _SWATCH + 6 + text_width(item.text, 12) + 16


def draw_legend(legend: Legend, left: float, top: float) -> Iterator[str]:
    """At this place."""
    for number, line in enumerate(legend.lines):
        x = left
        for item in line:
            y = top + number * LINE
            for kind in item.kinds:
                yield _swatch(kind, x, y)
            text = text_of(item.text)
            yield element("text", text, class_="ink", x=x + _SWATCH + 6, y=y + _HEIGHT - 1.5)
            x += _width(item)


def _swatch(kind: str, x: float, y: float) -> str:
    match kind:
        case "step":
            return element("path", class_=kind, d=f"M{x + _SWATCH / 2:g} {y - 1:g}v{_HEIGHT + 2}")
        case "wire":
            return element("path", class_=kind, d=f"M{x:g} {y:g}L{x + _SWATCH:g} {y + _HEIGHT:g}")
        case "upper" | "lower":
            half = _HEIGHT / 2
            top = y if kind == "upper" else y + half + 0.5
            fill = "F0" if kind == "upper" else "BW0"
            return element("rect", class_=fill, x=x, y=top, width=_SWATCH, height=half - 0.5)
        case _:
            inset = 1.25 if kind.startswith("of") else 0
            return element(
                "rect",
                class_=kind,
                x=x + inset,
                y=y + inset,
                width=_SWATCH - 2 * inset,
                height=_HEIGHT - 2 * inset,
            )
