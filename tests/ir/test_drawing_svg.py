"""The SVG picture is well-formed, self-contained, readable and complete."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from drawing_cases import healthy, paired, played
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from plan_generator import as_schedule, generate
from strategies import plans

from resihp.ir.drawing.colours import FILLS, HOMES, contrast, ink_on, shade
from resihp.ir.drawing.scene import Clock, scene_of
from resihp.ir.drawing.svg import draw_svg
from resihp.ir.explanation import example_of
from resihp.ir.model import GroupName, Op
from resihp.ir.parser import parse

GOLDEN = Path(__file__).parent / "golden" / "small.svg"
NAMESPACE = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"(F|B|W|BW)\d+")
SECONDS = Clock("s", "predicted")
FOREIGN = re.compile(r'(?:href|src)=|url\((?!#)|@import|https?:(?!//www\.w3\.org/2000/svg")')
"""What would be loaded from elsewhere."""


def drawn(plan, **more):
    return ET.fromstring(draw_svg(scene_of(played(plan)), **more))


def boxes(picture):
    return [
        rect
        for row in picture.iter(f"{NAMESPACE}g")
        for rect in row.iter(f"{NAMESPACE}rect")
        if BOX.fullmatch(rect.get("class", ""))
    ]


def texts(picture):
    return [element.text or "" for element in picture.iter(f"{NAMESPACE}text")]


@given(st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_every_compute_instruction_has_a_box(seed):
    """Which says what it is, in plans and in schedules; boxes lie inside the picture."""
    rng = random.Random(seed)
    plan = generate(rng)
    scene = scene_of(played(as_schedule(plan) if rng.random() < 0.3 else plan))
    picture = ET.fromstring(draw_svg(scene, width=6000))
    expected = sorted(box.op.mnemonic for row in scene.rows for box in row.boxes)
    said = [rect.findtext(f"{NAMESPACE}title", "") for rect in boxes(picture)]
    assert sorted(title.split()[0] for title in said) == expected
    for rect in boxes(picture):
        left, width = float(rect.get("x", "")), float(rect.get("width", ""))
        assert left > 0 and left + width < float(picture.get("width", ""))


@given(plans, st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_can_be_read_can_be_drawn(plan, wires):
    """Faulty plans too; the file is well-formed XML without anything from elsewhere."""
    text = draw_svg(scene_of(played(plan, with_memory=False)), wires=wires)
    picture = ET.fromstring(text)
    assert "script" not in text
    assert (
        re.findall(r'(?:href|src)=|url\((?!#)|@import|https?:(?!//www\.w3\.org/2000/svg")', text)
        == []
    )
    assert picture.tag == f"{NAMESPACE}svg"


def test_names_are_text_and_nothing_else():
    """Marks of XML are escaped, what XML cannot say is replaced."""
    plan = make_plan()
    model = msgspec.structs.replace(plan.model, name='a<b>&"c\x00\x1f')
    picture = drawn(msgspec.structs.replace(plan, model=model))
    assert texts(picture)[0].startswith('a<b>&"c\ufffd\ufffd: TP 1')


def test_micro_batches_are_numbered_where_there_is_room():
    """And not where there is none."""
    plan = healthy("1f1b", pp=2, microbatches=12)
    wide = [text for text in texts(drawn(plan)) if text == "11"]
    assert len(wide) >= 2 * 2
    narrow = drawn(plan, width=330)
    assert "11" not in texts(narrow)
    assert len(boxes(narrow)) == 2 * 2 * 12


def test_boxes_too_narrow_to_be_seen_are_drawn_together():
    """The picture of a long iteration stays small, and says how many there are."""
    plan = healthy("gpipe", pp=1, microbatches=3000)
    text = draw_svg(scene_of(played(plan)), width=800)
    assert len(text) < 60_000
    picture = ET.fromstring(text)
    assert len(boxes(picture)) < 1500


def test_work_of_another_replica_is_marked():
    """By its border, its hatch, its home, and a line in the legend."""
    picture = drawn(make_plan(dp=2, gone={1: 0}, microbatches=2))
    foreign = [rect for rect in picture.iter(f"{NAMESPACE}rect") if rect.get("class") == "of1"]
    assert len(foreign) == 1 + 2 * 2 * 2
    assert "of replica 1" in texts(picture)
    assert "1@1" in texts(picture)


def test_what_is_not_healthy_is_said():
    """TP degree, speed, lost and standby ranks, a replica without a group."""
    plan = make_plan(dp=3, tp=2, degrees={GroupName(1, 1): 1}, gone={2: 0})
    groups = tuple(group for group in plan.groups if group.name != GroupName(1, 0))
    known = played(msgspec.structs.replace(plan, groups=groups), speeds={2: 0.25})
    said = texts(ET.fromstring(draw_svg(scene_of(known))))
    assert "rank 6 · TP 1 (mesh 2)" in said
    assert "0.25× speed" in said
    assert "lost: ranks 8..11" in said
    assert "standby: rank 7" in said
    assert "run nothing: dp1.pp0" in said


def test_a_deadlock_is_shown_where_it_is():
    """With the instruction that waits."""
    known = played(parse(example_of("RHP501").bad).plan, with_memory=False)
    assert known.timeline.stuck
    said = texts(ET.fromstring(draw_svg(scene_of(known))))
    assert any(text.startswith("✕ waits for ever at ") for text in said)
    assert "deadlock: `resihp verify` names the circle" in said


def test_an_overlapped_pair_is_two_halves():
    """One above the other, as wide as both take."""
    picture = drawn(paired(healthy("zb-h1", pp=1, microbatches=1)))
    upper, lower = boxes(picture)[:2]
    assert upper.get("width") == lower.get("width")
    assert float(lower.get("y", "0")) >= float(upper.get("height", ""))
    assert "overlapped pair" in texts(picture)


@pytest.mark.parametrize("num_places", [1, 2, 4])
def test_numbers_can_be_read_on_their_boxes(num_places):
    """Contrast of at least 4.5, as WCAG 2 asks for small text."""
    for op in FILLS:
        for place in range(num_places):
            fill = shade(op, place, num_places)
            assert contrast(fill, ink_on(fill)) >= 4.5


def test_colours_are_told_apart_by_lightness_too():
    """Those that stand side by side in one picture: F, B and W, or F and BW."""
    for one, other in [(Op.F, Op.B), (Op.B, Op.W), (Op.F, Op.W)]:
        assert contrast(FILLS[one], FILLS[other]) > 1.2
    assert len({*FILLS.values(), *HOMES}) == len(FILLS) + len(HOMES)


@pytest.mark.parametrize(
    ("scale", "unit", "said"),
    [
        (1.0, "s", "iteration 12 s"),
        (1e-3, "ms", "iteration 12 ms"),
        (1e-6, "µs", "iteration 12 µs"),
    ],
)
def test_times_are_in_a_readable_unit(scale, unit, said):
    """Of the axis and of the iteration."""
    known = played(healthy("1f1b", pp=2, microbatches=3), clock=SECONDS)
    times = known.timeline
    scaled = times._replace(
        starts={name: [time * scale for time in each] for name, each in times.starts.items()},
        ends={name: [time * scale for time in each] for name, each in times.ends.items()},
    )
    shown = texts(ET.fromstring(draw_svg(scene_of(known._replace(timeline=scaled, facts=None)))))
    assert unit in shown
    assert any(text.startswith(f"iteration 12 {unit}") for text in shown)


def test_a_capacity_that_is_near_is_a_line():
    """One that is far away is only said."""
    known = played(healthy("1f1b", pp=2), capacity_bytes=None)
    rows = scene_of(known).rows
    peak = max(row.memory.peak_bytes for row in rows if row.memory is not None)
    near = draw_svg(scene_of(known._replace(capacity_bytes=peak)))
    far = draw_svg(scene_of(known._replace(capacity_bytes=100 * peak)))
    assert near.count('class="limit"') > 0
    assert far.count('class="limit"') == 0


def test_the_picture_of_a_small_plan_is_as_it_was(request):
    """To the letter; `--update-golden` writes what is drawn now."""
    plan = make_plan(dp=2, tp=2, degrees={GroupName(1, 1): 1}, microbatches=3, split=True)
    text = draw_svg(scene_of(played(plan)), wires=True)
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
