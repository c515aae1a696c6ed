"""Sizes of a picture: where rows and times are, in pixels."""

from __future__ import annotations

from typing import NamedTuple

from resihp.ir.drawing.scene import Panel, Row, Scene

__all__ = [
    "BAR",
    "LABEL_WIDTH",
    "MARGIN",
    "MEMORY",
    "PANEL_HEAD",
    "SIDE_WIDTH",
    "Frame",
    "Place",
    "fits",
    "frame_of",
    "plot_width",
    "text_width",
]

MARGIN = 18
LABEL_WIDTH = 164
SIDE_WIDTH = 128
PANEL_HEAD = 28
PANEL_GAP = 12
BAR, MEMORY, ROW_GAP = 26, 14, 9
_WIDE_ENOUGH = 24
"""Pixels for a usual box."""
_NARROWEST, _WIDEST = 640, 1720
_EM = 0.57
"""Width of a usual letter, as a share of the font's size."""


class Place(NamedTuple):
    """A row and where its bar begins."""

    row: Row
    top: float


class Frame(NamedTuple):
    """The picture without its content."""

    plot: float
    """Pixels of the time axis."""
    top: float
    """Where the first panel begins."""
    length: float
    """Time that the plot spans."""
    panels: tuple[tuple[Panel, float, tuple[Place, ...]], ...]
    """Each with its top."""
    row_height: float
    """Bar and memory."""
    bottom: float
    """Below the last row."""

    @property
    def left(self) -> float:
        """Where time begins."""
        return MARGIN + LABEL_WIDTH

    @property
    def right(self) -> float:
        """Where time ends."""
        return self.left + self.plot

    @property
    def width(self) -> float:
        """Of the whole picture."""
        return self.right + SIDE_WIDTH + MARGIN

    def x(self, time: float) -> float:
        """Where `time` is."""
        return self.left + (time / self.length * self.plot if self.length else 0.0)


def plot_width(scene: Scene, width: int | None = None) -> float:
    """Pixels of the time axis in a picture `width` wide, or else in one with room for numbers."""
    if width is not None:
        return max(width - 2 * MARGIN - LABEL_WIDTH - SIDE_WIDTH, 200)
    return float(round(min(max(scene.length * _scale(scene), _NARROWEST), _WIDEST)))


def frame_of(scene: Scene, plot: float, top: float) -> Frame:
    """Room for every row, below `top`."""
    height = BAR + (MEMORY if any(row.memory is not None for row in scene.rows) else 0)
    panels: list[tuple[Panel, float, tuple[Place, ...]]] = []
    y = top
    for panel in scene.panels:
        places: list[Place] = []
        head, y = y, y + PANEL_HEAD
        for row in panel.rows:
            places.append(Place(row, y))
            y += height + ROW_GAP
        panels.append((panel, head, tuple(places)))
        y += PANEL_GAP
    return Frame(plot, top, scene.length, tuple(panels), height, y - PANEL_GAP)


def _scale(scene: Scene) -> float:
    """Pixels per time that make a usual box wide enough: three of four are as long or longer."""
    spans = sorted(
        box.end - box.start for row in scene.rows for box in row.boxes if box.end > box.start
    )
    return _WIDE_ENOUGH / spans[len(spans) // 4] if spans else 1.0


def text_width(text: str, size: float) -> float:
    """About how many pixels `text` takes."""
    return len(text) * size * _EM


def fits(text: str, size: float, room: float) -> bool:
    """Whether `text` fits into `room` with a little air."""
    return text_width(text, size) + size / 5 <= room
