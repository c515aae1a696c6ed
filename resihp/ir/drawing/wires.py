"""What goes from group to group, as thin lines between rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from resihp.ir.drawing.frame import BAR, Frame
from resihp.ir.drawing.hops import hops_of
from resihp.ir.drawing.scene import Scene
from resihp.ir.drawing.xml import element

__all__ = ["MAX_WIRES", "draw_wires"]

MAX_WIRES = 2000


def draw_wires(scene: Scene, frame: Frame) -> Iterator[str]:
    """One path of the first `MAX_WIRES` lines, from the end of a maker to the start of a user."""
    tops = {place.row.group.name: place.top for _, _, places in frame.panels for place in places}
    lines: list[str] = []
    for hop in islice(hops_of(scene), MAX_WIRES):
        down = tops[hop.receiver] > tops[hop.sender]
        start = tops[hop.sender] + (BAR if down else 0)
        end = tops[hop.receiver] + (0 if down else BAR)
        lines.append(f"M{frame.x(hop.made):.1f} {start:g}L{frame.x(hop.used):.1f} {end:g}")
    if lines:
        yield element("path", class_="wire", d="".join(lines))
