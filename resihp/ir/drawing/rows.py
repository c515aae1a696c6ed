"""One row of an SVG picture: name, bubbles, boxes, what closes the iteration, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from resihp.ir.drawing.axis import spell_time
from resihp.ir.drawing.frame import BAR, LABEL_WIDTH, MARGIN, MEMORY, Frame, Place, fits
from resihp.ir.drawing.memory import Curve
from resihp.ir.drawing.scene import Box, Clock, Row
from resihp.ir.drawing.style import box_class, home_class
from resihp.ir.drawing.xml import element, number, text_of
from resihp.ir.lanes import name_of
from resihp.ir.model import Op
from resihp.ir.statements import spell_numbers
from resihp.ir.verify.memory import readable_bytes

__all__ = ["Pen", "draw_row"]

_GAP = 0.8
"""Between boxes, in pixels."""
_NARROW = 1.2
"""Boxes narrower than this are drawn as one with their like."""
_HALF = BAR / 2


class Pen(NamedTuple):
    """What is the same for all rows."""

    clock: Clock
    mesh_tp: int
    most_bytes: int
    """Beyond a group's state: at the top of each strip of memory."""
    capacity_bytes: int | None
    with_titles: bool


def draw_row(place: Place, frame: Frame, pen: Pen) -> str:
    """A group."""
    row = place.row
    parts = [
        *_label(row, pen),
        element("rect", class_="track", x=frame.left, width=frame.plot, height=BAR),
    ]
    parts += _marks(row, frame)
    for run in _runs(row.boxes, frame):
        parts += _box(run, row, frame, pen)
    parts += _moments(row, frame)
    if row.stuck is not None:
        parts.append(_stuck(row, frame))
    parts += _side(row, frame, pen)
    if row.memory is not None:
        parts += _memory(row.memory, frame, pen)
    return element("g", *parts, transform=f"translate(0 {number(place.top)})")


def _label(row: Row, pen: Pen) -> Iterator[str]:
    alone = row.stages == (row.group.pp,)
    stages = ", ".join(map(str, row.stages))
    name = f"stage {stages}" if alone else f"pp{row.group.pp}: stages {stages}"
    if len(row.stages) == 1 and not alone:
        name = f"pp{row.group.pp}: stage {stages}"
    if not fits(name, 12, LABEL_WIDTH - 10):
        name = f"pp{row.group.pp}: {len(row.stages)} stages"
    yield element("text", text_of(name), class_="ink name", x=MARGIN, y=11)
    if row.speed < 1:
        speed = f"{row.speed:.3g}× speed"
        yield element("text", text_of(speed), class_="warn name small", x=MARGIN, y=37)
    ranks = spell_numbers(row.group.ranks)
    degree = f"TP {row.group.tp}"
    if row.group.tp != pen.mesh_tp:
        degree += f" (mesh {pen.mesh_tp})"
    where = f"rank{'' if row.group.tp == 1 else 's'} {ranks} · {degree}"
    if not fits(where, 10.5, LABEL_WIDTH):
        where = f"{row.group.tp} ranks from {min(row.group.ranks)} · {degree}"
    yield element("text", text_of(where), class_="muted small", x=MARGIN, y=24)


def _side(row: Row, frame: Frame, pen: Pen) -> Iterator[str]:
    x, idle = frame.right + 10, f"idle {row.idle / (frame.length or 1):.0%}"
    yield element("text", text_of(idle), class_="ink", x=x, y=17)
    if row.memory is None:
        return
    peak = row.memory.peak_bytes
    of = f" of {readable_bytes(pen.capacity_bytes)}" if pen.capacity_bytes else ""
    too_much = pen.capacity_bytes is not None and peak > pen.capacity_bytes
    kind = "warn name small" if too_much else "muted small"
    yield element("text", text_of(f"{_short_bytes(peak)}{of}"), class_=kind, x=x, y=BAR + 12)


def _short_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


def _runs(boxes: Sequence[Box], frame: Frame) -> Iterator[tuple[Box, ...]]:
    """Each box alone, or many that are too narrow to be seen and look the same."""
    scale = frame.plot / frame.length if frame.length else 0.0
    run: list[Box] = []
    for box in boxes:
        narrow = (box.end - box.start) * scale < _NARROW
        last = run[-1] if run else None
        if last is not None and narrow and _looks_like(last, box) and box.start <= last.end:
            run.append(box)
            continue
        if run:
            yield tuple(run)
        run = [box]
        if not narrow:
            yield (box,)
            run = []
    if run:
        yield tuple(run)


def _looks_like(one: Box, other: Box) -> bool:
    return (one.op, one.task.stage, one.task.home, one.half) == (
        other.op,
        other.task.stage,
        other.task.home,
        other.half,
    )


def _box(run: tuple[Box, ...], row: Row, frame: Frame, pen: Pen) -> Iterator[str]:
    box = run[0]
    left, right = frame.x(box.start), frame.x(run[-1].end)
    width = max(right - left - (_GAP if right - left > 3 else 0), 0.3)
    top = _HALF if box.half == 2 else 0
    height = _HALF - 0.5 if box.half else BAR
    kind = box_class(box.op, row.stages.index(box.task.stage))
    title = [element("title", text_of(_tells(run, row, pen)))] if pen.with_titles else []
    where = {"x": left, "width": width, "height": height} | ({"y": top} if top else {})
    yield element("rect", *title, class_=kind, **where)
    foreign = box.task.home != row.group.replica
    if foreign and width > 3:
        yield element("rect", class_="hatch", **where)
        inside = {"x": left + 1.25, "width": width - 2.5, "height": height - 2.5, "y": top + 1.25}
        yield element("rect", class_=home_class(box.task.home), **inside)
    if len(run) == 1:
        yield from _number(box, row, left + width / 2, width, kind)


def _number(box: Box, row: Row, middle: float, width: float, kind: str) -> Iterator[str]:
    """The micro-batch, if there is room: `3`, or `3@1` where its home is another replica."""
    short, name = str(box.task.number), name_of(box.task, row.group.replica)
    border = 5 if short != name else 0
    room = width - border
    if box.half:
        y = 10.0 if box.half == 1 else _HALF + 10.0
        shown = next((text for text in (name, short) if fits(text, 9, room)), None)
        if shown is not None:
            yield element("text", shown, class_=f"on-{kind} tiny", x=middle, y=y)
    elif fits(name, 12, room):
        yield element("text", name, class_=f"on-{kind}", x=middle, y=17.2)
    elif fits(short, 10.5, room) and fits(f"@{box.task.home}", 9, room) and short != name:
        yield element("text", short, class_=f"on-{kind} small", x=middle, y=12)
        yield element("text", f"@{box.task.home}", class_=f"on-{kind} tiny", x=middle, y=21.5)
    elif fits(short, 9, width):
        yield element("text", short, class_=f"on-{kind} tiny", x=middle, y=16.2)


def _tells(run: tuple[Box, ...], row: Row, pen: Pen) -> str:
    first, last = run[0], run[-1]
    name = name_of(first.task, row.group.replica)
    what = f"{first.op.mnemonic} {name}"
    if len(run) > 1:
        what = (
            f"{len(run)} × {first.op.mnemonic}, {name} to {name_of(last.task, row.group.replica)}"
        )
    pair = ", overlapped" if first.half else ""
    start, end = (spell_time(time, pen.clock) for time in (first.start, last.end))
    return f"{what} at stage {first.task.stage}{pair}: {start} to {end}"


def _marks(row: Row, frame: Frame) -> Iterator[str]:
    """Reductions and steps that take time."""
    for mark in row.marks:
        left, width = frame.x(mark.start), frame.x(mark.end) - frame.x(mark.start)
        if width >= 1:
            kind = "reduce" if mark.op is Op.REDUCE_GRADS else "update"
            yield element("rect", class_=kind, x=left, width=width, height=BAR)
            if fits(kind, 9, width):
                x = left + width / 2
                yield element("text", kind, class_=f"on-{kind} tiny", x=x, y=16.2)


def _moments(row: Row, frame: Frame) -> Iterator[str]:
    """A line where a reduction that takes no time is, and where each step ends."""
    for mark in row.marks:
        right = frame.x(mark.end)
        if mark.op is Op.STEP:
            yield element("path", class_="step", d=f"M{right:.1f} -2v{BAR + 4}")
        elif right - frame.x(mark.start) < 1:
            yield element("rect", class_="reduce", x=right - 2, width=2, height=BAR)


def _stuck(row: Row, frame: Frame) -> str:
    times = [box.end for box in row.boxes]
    text = f"✕ waits for ever at {row.stuck}"
    return element(
        "text", text_of(text), class_="warn name", x=frame.x(max(times, default=0)) + 4, y=17
    )


def _memory(curve: Curve, frame: Frame, pen: Pen) -> Iterator[str]:
    """Bytes beyond the state over time, on one scale for all rows."""
    bottom, high = BAR + MEMORY - 0.5, MEMORY - 2.5
    scale = high / pen.most_bytes if pen.most_bytes else 0.0
    points: list[str] = []
    for x, num_bytes in _visible(curve, frame):
        points.append(f"H{x:.1f}V{bottom - (num_bytes - curve.state_bytes) * scale:.1f}")
    line = "".join(points)[1:].split("V", 1)
    path = f"M{line[0]} {line[1]}H{frame.right:.1f}"
    yield element("path", class_="memory", d=f"{path}V{bottom:g}H{frame.left:g}Z")
    yield element("path", class_="memory-line", d=path)
    room = None if pen.capacity_bytes is None else pen.capacity_bytes - curve.state_bytes
    if room is not None and 0 <= room <= pen.most_bytes:
        y = bottom - room * scale
        yield element("path", class_="limit", d=f"M{frame.left:g} {y:.1f}H{frame.right:g}")


def _visible(curve: Curve, frame: Frame) -> Iterator[tuple[float, int]]:
    """Of all points that share half a pixel the highest and the last."""
    column, highest, last = -1.0, 0, 0
    for time, num_bytes in zip(curve.times, curve.num_bytes, strict=True):
        x = round(frame.x(time) * 2) / 2
        if x != column:
            if column >= 0:
                yield column, highest
                if last != highest:
                    yield column, last
            column, highest = x, num_bytes
        highest, last = max(highest, num_bytes), num_bytes
    yield column, highest
    if last != highest:
        yield column, last
