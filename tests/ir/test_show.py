"""The picture of plans whose groups run several stages."""

from __future__ import annotations

import re

import msgspec
import pytest
from plan_build import MODEL

from resihp.compiler import initial_plan
from resihp.ir.explanation import example_of
from resihp.ir.model import Batch, Level, Mesh
from resihp.ir.parser import parse
from resihp.ir.show import draw

HEAD = """plan 1
model tiny layers=4 hidden=64 heads=8 kv_heads=4 ffn=96 vocab=128
mesh tp=1 pp={pp} dp=1
batch microbatches=2 tokens=16
"""
ALONE = HEAD.format(pp=1) + "group dp0.pp0 ranks=0 layers=0..1,2..3\nstream dp=0 pp=0 {{\n{}}}\n"


def picture(body, *, width=100):
    """The rows of one group that runs two stages, without the ruler."""
    text = ALONE.format("".join(f"  {instr}\n" for instr in body.split(", ")))
    rows = draw(parse(text).plan, width=width).split("\n\n")[1].splitlines()[1:]
    return [re.sub(r"^(\S*)\s+\[", r"\1 [", row) for row in rows]


IN_TURN = "F[0] 0, F[1] 0, BW[1] 0, F[0] 1, BW[0] 0, F[1] 1, BW[1] 1, BW[0] 1"


def test_each_stage_of_a_group_has_a_row():
    """Blank while the group runs the other one; the share of idle time is the group's."""
    assert picture(IN_TURN) == [
        "dp0.pp0 [0]    0%  F0          F1 X0 X0          X1 X1",
        " [1]           F0 X0 X0          F1 X1 X1",
    ]


def test_the_legend_explains_the_rows():
    """And only where there are some."""
    text = ALONE.format("  F[0] 0\n")
    assert "[N]: stage N of the model" in draw(parse(text).plan)
    single = text.replace("0..1,2..3", "0..3").replace("F[0]", "F")
    assert "stage N" not in draw(parse(single).plan)


def test_a_time_at_which_a_group_does_nothing_is_idle_on_all_its_rows():
    """The second position waits for the first activation."""
    text = (
        HEAD.format(pp=2)
        + "group dp0.pp0 ranks=0 layers=0..0\ngroup dp0.pp1 ranks=1 layers=1..1,2..3\n"
        + "stream dp=0 pp=0 {\n  F 0\n  send_act 0\n}\n"
        + "stream dp=0 pp=1 {\n  recv_act[1] 0\n  F[1] 0\n  F[2] 0\n}\n"
    )
    rows = draw(parse(text).plan).split("\n\n")[1].splitlines()[1:]
    assert [row.split("%")[-1].strip() for row in rows[:2]] == ["F0 .  .", ".  F0"]
    assert rows[2].split() == ["[2]", ".", "F0"]


@pytest.mark.parametrize("width", [40, 60])
def test_a_long_picture_is_broken_into_bands_with_all_rows(width):
    """No line is wider than asked for, and each band names the group."""
    bands = draw(parse(ALONE.format(IN_TURN.replace(", ", "\n") + "\n")).plan, width=width)
    assert all(len(line) <= width for line in bands.splitlines()[2:-4])
    assert bands.count("dp0.pp0 [0]") == bands.count("        [1]") >= 1


def test_a_pair_is_marked():
    """Its two share the device: they are drawn one after the other, and belong together."""
    paired = IN_TURN.replace("BW[1] 0, F[0] 1, BW[0] 0", "F[0] 1 & BW[1] 0, BW[0] 0")
    assert picture(paired) == [
        "dp0.pp0 [0]    0%  F0      F1&         X0  X0              X1  X1",
        " [1]            F0      X0  X0          F1  X1  X1",
    ]
    text = ALONE.format("  F[0] 0\n  F[0] 1 & F[1] 0\n")
    assert "F3& overlapped with what follows" in draw(parse(text).plan)


def test_a_schedule_is_drawn_like_the_plan_that_it_becomes():
    """Transfers take no time, so the picture is the same but for the words above and below."""
    batch = Batch(microbatches=4, tokens=16)
    plan = initial_plan(MODEL, Mesh(tp=1, pp=2, dp=2), batch, schedule="zbv")
    streams = tuple(
        msgspec.structs.replace(s, body=tuple(i for i in s.body if i.op.is_compute))
        for s in plan.streams
    )
    schedule = msgspec.structs.replace(plan, level=Level.SCHEDULE, streams=streams)
    assert draw(schedule) == draw(plan)


def test_the_picture_is_that_of_the_transport_of_the_plan():
    """A send that blocks is seen as idle time, and the legend says why."""
    text = example_of("RHP904").bad
    free = text.replace("transport eager=0\n", "")
    assert "; 16 units of time" in draw(parse(text).plan)
    assert "but for waits of transport `eager=0`" in draw(parse(text).plan)
    assert "; 14 units of time" in draw(parse(free).plan)
    assert "waits" not in draw(parse(free).plan)
