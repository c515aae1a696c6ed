"""A scene as SVG: stages as rows, time from left to right. Self-contained, no script, no fonts."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.drawing.axis import axis_of, spell_time
from resihp.ir.drawing.frame import (
    LABEL_WIDTH,
    MARGIN,
    PANEL_HEAD,
    Frame,
    fits,
    frame_of,
    plot_width,
)
from resihp.ir.drawing.legend import LINE, Legend, draw_legend, legend_of
from resihp.ir.drawing.phases import phases_of
from resihp.ir.drawing.rows import Pen, draw_row
from resihp.ir.drawing.scene import Panel, Scene
from resihp.ir.drawing.style import HATCH, style_sheet
from resihp.ir.drawing.wires import draw_wires
from resihp.ir.drawing.xml import element, text_of
from resihp.ir.statements import spell_numbers

__all__ = ["draw_svg"]

_AXIS_HEIGHT = 24
_TICK_ROOM = 84
_NEAR = 1.5
"""A capacity that is not further than this times what is needed is drawn as a line."""
_MOST_TITLES = 4000
"""Boxes that say what they are when the mouse is over them."""


def draw_svg(scene: Scene, *, width: int | None = None, wires: bool = False) -> str:
    """The picture as the text of an SVG file.

    `width` in pixels (None: wide enough for the numbers of micro-batches). `wires` draws what
    goes from group to group as thin lines.
    """
    plot = plot_width(scene, width)
    legend = legend_of(scene, plot, wires=wires)
    top = 58 + legend.num_lines * LINE + _AXIS_HEIGHT
    frame = frame_of(scene, plot, top)
    pen = _pen(scene)
    notes = list(_notes(scene))
    height = frame.bottom + _AXIS_HEIGHT + 16 * len(notes) + MARGIN
    parts = [
        element("title", text_of(_title(scene))),
        element("style", _style(scene)),
        element("defs", HATCH),
        element("rect", class_="page", width=frame.width, height=height),
        *_head(scene, frame, legend),
        *_grid(scene, frame),
    ]
    for panel, panel_top, places in frame.panels:
        parts += _panel_head(panel, panel_top, frame)
        parts += [draw_row(place, frame, pen) for place in places]
    if wires:
        parts += draw_wires(scene, frame)
    for number, note in enumerate(notes):
        y = frame.bottom + _AXIS_HEIGHT + 16 * (number + 1)
        parts.append(element("text", text_of(note), class_="muted", x=MARGIN, y=y))
    size = {"width": frame.width, "height": height}
    return (
        element(
            "svg",
            *(f"\n{part}" for part in parts),
            "\n",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {frame.width:g} {height:g}",
            role="img",
            **size,
        )
        + "\n"
    )


def _pen(scene: Scene) -> Pen:
    curves = [row.memory for row in scene.rows if row.memory is not None]
    capacity = scene.played.capacity_bytes
    most = max((curve.peak_bytes - curve.state_bytes for curve in curves), default=0)
    if capacity is not None:
        rooms = [capacity - curve.state_bytes for curve in curves]
        most = max([most, *(room for room in rooms if room <= _NEAR * most)])
    num_boxes = sum(len(row.boxes) for row in scene.rows)
    return Pen(
        clock=scene.played.clock,
        mesh_tp=scene.played.plan.mesh.tp,
        most_bytes=most,
        capacity_bytes=capacity,
        with_titles=num_boxes <= _MOST_TITLES,
    )


def _style(scene: Scene) -> str:
    rows = list(scene.rows)
    ops = sorted({box.op for row in rows for box in row.boxes})
    num_places = max((len(row.stages) for row in rows), default=1)
    return style_sheet(ops, num_places, scene.homes)


def _title(scene: Scene) -> str:
    plan = scene.played.plan
    mesh, count = plan.mesh, plan.batch.microbatches
    order = f", order {plan.schedule}" if plan.schedule else ""
    return (
        f"{plan.model.name}: TP {mesh.tp}, PP {mesh.pp}, DP {mesh.dp}, {count} "
        f"micro-batch{'' if count == 1 else 'es'} per replica{order}"
    )


def _subtitle(scene: Scene) -> str:
    plan, clock = scene.played.plan, scene.played.clock
    return (
        f"iteration {spell_time(scene.length, clock)}, bubble {scene.bubble:.1%}, "
        f"{len(plan.active_ranks)} of {plan.mesh.world} ranks compute; {clock.note}"
    )


def _head(scene: Scene, frame: Frame, legend: Legend) -> Iterator[str]:
    yield element("text", text_of(_title(scene)), class_="ink title", x=MARGIN, y=28)
    yield element("text", text_of(_subtitle(scene)), class_="muted", x=MARGIN, y=47)
    yield from draw_legend(legend, MARGIN, 58)


def _grid(scene: Scene, frame: Frame) -> Iterator[str]:
    """Times above and below, a line through the rows of each panel at every tick."""
    axis = axis_of(scene.length, scene.played.clock, max(2, round(frame.plot / _TICK_ROOM)))
    high, low = frame.top - 4, frame.bottom + 6
    spans = [(high, high + 6), (low - 10, low - 2)]
    for _, _, places in frame.panels:
        if places:
            spans.append((places[0].top - 3, places[-1].top + frame.row_height + 3))
    path = "".join(
        f"M{frame.x(tick):.1f} {top:g}V{bottom:g}" for tick in axis.ticks for top, bottom in spans
    )
    yield element("path", class_="grid", d=path)
    for y in (high - 5, low + 10):
        for tick, label in zip(axis.ticks, axis.labels, strict=True):
            x = frame.x(tick)
            yield element("text", text_of(label), class_="muted small middle", x=x, y=y)
        yield element("text", text_of(axis.unit), class_="muted small", x=frame.right + 14, y=y)


def _panel_head(panel: Panel, top: float, frame: Frame) -> Iterator[str]:
    others = sorted(set(panel.alike) - {panel.replica})
    name = f"replica {panel.replica}"
    if others:
        name = f"replicas {spell_numbers(sorted(panel.alike))}"
        if not fits(name, 12, LABEL_WIDTH):
            name = f"replica {panel.replica} and {len(others)} like it"
    yield element("text", text_of(name), class_="ink name", x=MARGIN, y=top + PANEL_HEAD - 9)
    y = top + PANEL_HEAD - 12
    for phase in phases_of(panel):
        left, right = frame.x(phase.start), frame.x(phase.end)
        if right - left < 8:
            continue
        room = right - left - 8
        d = f"M{left + 1:.1f} {y - 4:g}v8m0 -4"
        if fits(phase.name, 10.5, room):
            middle, half = (left + right) / 2, len(phase.name) * 10.5 * 0.28 + 4
            d += f"H{middle - half:.1f}M{middle + half:.1f} {y:g}H{right - 1:.1f}m0 -4v8"
            yield element(
                "text", text_of(phase.name), class_="muted small middle", x=middle, y=y + 3.5
            )
        else:
            d += f"H{right - 1:.1f}m0 -4v8"
        yield element("path", class_="phase", d=d)


def _notes(scene: Scene) -> Iterator[str]:
    plan = scene.played.plan
    if scene.num_left_out:
        more = scene.num_left_out
        yield (
            f"{more} more kind{'' if more == 1 else 's'} of replicas not drawn; `--replicas` "
            "chooses others"
        )
    if plan.lost:
        yield f"lost: rank{'' if len(plan.lost) == 1 else 's'} {spell_numbers(plan.lost)}"
    if plan.standby:
        count = len(plan.standby)
        yield f"standby: rank{'' if count == 1 else 's'} {spell_numbers(plan.standby)}"
    positions = {group.pp for group in plan.groups}
    empty = [
        f"dp{panel.replica}.pp{pp}"
        for panel in scene.panels
        for pp in sorted(positions - {row.group.pp for row in panel.rows})
    ]
    if empty:
        yield f"run nothing: {', '.join(empty[:8])}{' and more' if len(empty) > 8 else ''}"
    if scene.played.timeline.stuck:
        yield "deadlock: `resihp verify` names the circle"
