"""What the verifier says: every code, its place, and silence about plans that are right."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from strategies import plans

from resihp.errors import PlanSyntaxError
from resihp.ir.codes import CODES, explain
from resihp.ir.explanation import example_of
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.kept import without
from resihp.ir.model import GroupName, MicroBatch, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.render import render_text
from resihp.ir.verify import verify

PIPE = print_plan(make_plan(split=True))
"""Two stages, one replica, four micro-batches, B and W apart."""
WIDE = print_plan(make_plan(dp=2, tp=2, degrees={GroupName(1, 0): 1}))
"""Two replicas; replica 1 has TP 1 -> 2 and a standby rank."""
IN_PLACE, OVERLAPPED, MOVED, SHARDED = (
    example_of(code).good for code in ("RHP415", "RHP110", "RHP414", "RHP418")
)
"""Two stages on one rank; with an overlapped pair; a micro-batch run elsewhere; FSDP."""
FACTS = StageFacts(
    state_bytes=1000,
    activation_bytes=100,
    released_by_b_bytes=60,
    weight_input_grad_bytes=10,
    boundary_bytes=7,
)


def facts(plan: Plan) -> Facts:
    return Facts(stages={group.name: (FACTS,) * len(group.layers) for group in plan.groups})


def edit(text: str, *edits: tuple[str, str]) -> str:
    """Replace the first occurrence of each; a missing one is a mistake of the test."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def findings(text: str, **options) -> list[tuple[str, str]]:
    """(code, source line without blanks) of every finding."""
    lines = text.split("\n")
    found = verify(parse(text), facts=facts, **options)
    return [(finding.code, lines[finding.span.line - 1].strip()) for finding in found]


@pytest.mark.parametrize(
    ("pp", "dp", "microbatches", "order", "split"),
    [
        (pp, dp, microbatches, order, split)
        for pp, dp, microbatches in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 5))
        for order, split in (("1f1b", True), ("1f1b", False), ("gpipe", True))
    ],
)
def test_a_right_plan_has_no_findings(pp, dp, microbatches, order, split):
    """1F1B and GPipe, fused and split, for any mesh."""
    plan = make_plan(pp=pp, dp=dp, microbatches=microbatches, order=order, split=split)
    assert verify(parse(print_plan(plan))) == []


@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 4), repeat=3)))
def test_unequal_tp_along_a_pipeline_is_fine(degrees):
    """Any powers of two next to each other, with scatter and gather."""
    by_name = {GroupName(0, stage): degree for stage, degree in enumerate(degrees)}
    plan = make_plan(pp=3, tp=4, degrees=by_name)
    assert verify(parse(print_plan(plan))) == []


def test_a_dropped_replica_is_fine_if_others_run_its_micro_batches():
    """The survivor runs foreign micro-batches at every stage."""
    plan = make_plan(pp=3, dp=3, gone={1: 0})
    assert verify(parse(print_plan(plan))) == []


class Case(NamedTuple):
    """One mistake, and all that the verifier should say about it."""

    code: str
    base: str
    edits: tuple[tuple[str, str], ...]
    expected: tuple[tuple[str, str], ...]


def case(
    code: str,
    base: str,
    *edits: tuple[str, str],
    at: str,
    also: tuple[tuple[str, str], ...] = (),
) -> Case:
    """Replacing each pair of `edits` in `base` gives `code` at line `at`, and `also`."""
    return Case(code, base, edits, tuple(sorted(((code, at), *also))))


CASES = [
    case(
        "RHP101",
        PIPE,
        ("ranks=1 ", "ranks=2 "),
        at="group dp0.pp1 ranks=2 layers=4..7",
        also=(("RHP202", "mesh tp=1 pp=2 dp=1"),),
    ),
    case(
        "RHP102",
        PIPE,
        (
            "reduce_grads\n  step\n}\n",
            "reduce_grads\n  step\n}\nstream dp=3 pp=0 {\n  reduce_grads\n  step\n}\n",
        ),
        at="stream dp=3 pp=0 {",
    ),
    case("RHP103", PIPE, ("4..7", "4..8"), at="group dp0.pp1 ranks=1 layers=4..8"),
    case("RHP104", PIPE, ("  F 3\n", "  F 4\n"), at="F 4", also=(("RHP301", "B 3"),)),
    case("RHP105", PIPE, ("  F 3\n", "  F 3@1\n"), at="F 3@1", also=(("RHP301", "B 3"),)),
    case(
        "RHP106",
        PIPE,
        ("group dp0.pp1", "group dp0.pp0 ranks=0 layers=0..3\ngroup dp0.pp1"),
        at="group dp0.pp0 ranks=0 layers=0..3",
        also=(("RHP201", "group dp0.pp0 ranks=0 layers=0..3"),),
    ),
    case(
        "RHP107",
        PIPE,
        ("stream dp=0 pp=1", "stream dp=0 pp=0"),
        at="stream dp=0 pp=0 {",
        also=(("RHP206", "group dp0.pp1 ranks=1 layers=4..7"),),
    ),
    case(
        "RHP108",
        PIPE,
        ("kv_heads=4", "kv_heads=3"),
        at="model tiny layers=8 hidden=64 heads=8 kv_heads=3 ffn=96 vocab=128",
    ),
    case("RHP109", IN_PLACE, ("  step\n", "  gather_params[2]\n  step\n"), at="gather_params[2]"),
    case(
        "RHP110",
        OVERLAPPED,
        ("F[0] 1 & BW[1] 0\n  F[1] 1\n", "F[0] 1 & F[1] 1\n  BW[1] 0\n"),
        at="F[0] 1 & F[1] 1",
    ),
    case("RHP111", PIPE, ("\n\ngroup", "\nrecompute 0,2\n\ngroup"), at="recompute 0,2"),
    case("RHP111", PIPE, ("\n\ngroup", "\nrecompute 1,0\n\ngroup"), at="recompute 1,0"),
    case(
        "RHP112",
        print_plan(without(make_plan(pp=1, dp=2), [MicroBatch(0, 1)], 7)),
        ("keep=1", "keep=1,1"),
        at="resume step=7 keep=1,1",
    ),
    case("RHP201", WIDE, ("standby 5", "standby 4,5"), at="standby 4,5"),
    case("RHP202", WIDE, ("standby 5\n", ""), at="mesh tp=2 pp=2 dp=2"),
    case(
        "RHP203",
        WIDE,
        ("heads=8 kv_heads=4", "heads=1 kv_heads=1"),
        at="group dp0.pp0 ranks=0,1 layers=0..3",
        also=(
            ("RHP203", "group dp0.pp1 ranks=2,3 layers=4..7"),
            ("RHP203", "group dp1.pp1 ranks=6,7 layers=4..7"),
        ),
    ),
    case(
        "RHP204",
        WIDE,
        ("ranks=4   layers=0..3", "ranks=4   layers=0..2"),
        at="group dp1.pp0 ranks=4   layers=0..2",
    ),
    case("RHP205", PIPE, ("layers=0..3", "layers=0..2"), at="group dp0.pp1 ranks=1 layers=4..7"),
    case(
        "RHP206",
        WIDE,
        ("stream dp=1 pp=0", "stream dp=0 pp=0"),
        at="group dp1.pp0 ranks=4   layers=0..3",
        also=(("RHP107", "stream dp=0 pp=0 {"), ("RHP301", "stream dp=0 pp=0 {")),
    ),
    case(
        "RHP207",
        PIPE,
        ("group dp0.pp1 ranks=1 layers=4..7", "standby 1"),
        at="stream dp=0 pp=1 {",
        also=(("RHP205", "group dp0.pp0 ranks=0 layers=0..3"),),
    ),
    case("RHP301", print_plan(make_plan(pp=1)), ("  F 3\n  BW 3\n", ""), at="stream dp=0 pp=0 {"),
    case("RHP302", PIPE, ("  F 1\n", "  F 1\n  F 1\n"), at="F 1"),
    case("RHP303", PIPE, ("  W 2\n", ""), at="F 2"),
    case("RHP304", PIPE, ("  B 2\n  W 2\n", "  BW 2\n  W 2\n"), at="BW 2"),
    case("RHP305", PIPE, ("  B 2\n  W 2\n", "  W 2\n  B 2\n"), at="W 2"),
    case(
        "RHP306",
        print_plan(make_plan(pp=1, dp=2)),
        ("  BW 3\n", ""),
        ("dp=1 pp=0 {\n", "dp=1 pp=0 {\n  BW 3@0\n"),
        at="BW 3@0",
    ),
    case(
        "RHP307",
        print_plan(without(make_plan(pp=1, dp=2), [MicroBatch(0, 1)], 7)),
        ("stream dp=0 pp=0 {\n", "stream dp=0 pp=0 {\n  F 1\n  BW 1\n"),
        at="F 1",
    ),
    case("RHP401", PIPE, ("  send_act 2\n", ""), at="recv_act 2"),
    case("RHP402", PIPE, ("  recv_grad 2\n", ""), at="send_grad 2"),
    case("RHP403", PIPE, ("  send_act 2\n", "  send_act 2\n  send_act 2\n"), at="send_act 2"),
    case("RHP404", PIPE, ("  send_act 2\n", ""), ("  recv_act 2\n", ""), at="F 2"),
    case("RHP405", PIPE, ("  recv_act 2\n  F 2\n", "  F 2\n  recv_act 2\n"), at="recv_act 2"),
    case("RHP406", PIPE, ("  F 2\n  send_act 2\n", "  send_act 2\n  F 2\n"), at="send_act 2"),
    case("RHP407", PIPE, ("  F 0\n", "  recv_act 0\n  F 0\n"), at="recv_act 0"),
    case("RHP408", WIDE, ("  gather_act 2\n  F 2\n", "  F 2\n  gather_act 2\n"), at="gather_act 2"),
    case("RHP409", PIPE, ("  send_act 2\n", "  scatter_act 2\n  send_act 2\n"), at="recv_act 2"),
    case("RHP410", WIDE, ("  scatter_act 2\n", ""), at="send_act 2"),
    case(
        "RHP411",
        WIDE,
        ("tokens=16", "tokens=17"),
        at="scatter_act 0",
        also=(("RHP411", "scatter_grad 0"),),
    ),
    case(
        "RHP412",
        print_plan(make_plan(order="gpipe")),
        (
            "  recv_act 0\n  F 0\n  recv_act 1\n  F 1\n",
            "  recv_act 1\n  F 1\n  recv_act 0\n  F 0\n",
        ),
        at="recv_act 1",
    ),
    case(
        "RHP413",
        print_plan(make_plan(dp=2)),
        ("  reduce_grads\n", "  send_act 1@1\n  reduce_grads\n"),
        at="send_act 1@1",
    ),
    case("RHP414", MOVED, ("  send_act 0 -> dp0\n", "  send_act 0\n"), at="send_act 0"),
    case("RHP415", IN_PLACE, ("  F[1] 0\n", "  recv_act[1] 0\n  F[1] 0\n"), at="recv_act[1] 0"),
    case("RHP416", IN_PLACE, ("  F[0] 0\n  F[1] 0\n", "  F[1] 0\n  F[0] 0\n"), at="F[1] 0"),
    case("RHP417", SHARDED, ("  gather_params\n  BW 0\n", "  BW 0\n"), at="BW 0"),
    case(
        "RHP418",
        SHARDED,
        ("  free_params\n  gather_params\n", "  gather_params\n"),
        at="gather_params",
    ),
    case(
        "RHP501",
        PIPE,
        ("  send_act 0\n", ""),
        ("  B 0\n", "  B 0\n  send_act 0\n"),
        at="B 0",
        also=(("RHP412", "recv_act 0"),),
    ),
    case("RHP601", PIPE, ("\n\n", "\nmemory 1200\n\n"), at="B 0"),
    case(
        "RHP602",
        PIPE,
        ("\n\n", "\nmemory 999\n\n"),
        at="group dp0.pp0 ranks=0 layers=0..3",
        also=(("RHP602", "group dp0.pp1 ranks=1 layers=4..7"),),
    ),
    case("RHP701", PIPE, ("  reduce_grads\n", ""), at="stream dp=0 pp=0 {"),
    case("RHP702", PIPE, ("  step\n", ""), at="stream dp=0 pp=0 {"),
    case("RHP703", PIPE, ("  step\n", "  step\n  step\n"), at="step"),
    case("RHP704", PIPE, ("  W 3\n  reduce_grads\n", "  reduce_grads\n  W 3\n"), at="W 3"),
    case("RHP705", PIPE, ("  reduce_grads\n  step\n", "  step\n  reduce_grads\n"), at="step"),
]


@pytest.mark.parametrize("mistake", CASES, ids=[case.code for case in CASES])
def test_one_mistake_gives_its_code_at_its_line_and_little_else(mistake):
    """Each code is triggered by the mistake that it is about, without a cascade."""
    text = edit(mistake.base, *mistake.edits)
    assert sorted(findings(text)) == list(mistake.expected)


@pytest.mark.parametrize("mistake", CASES, ids=[case.code for case in CASES])
def test_the_caret_covers_the_statement_or_the_key_that_is_wrong(mistake):
    """Columns are exact: a whole instruction or line without its brace, or one `key=value`."""
    text = edit(mistake.base, *mistake.edits)
    lines = text.split("\n")
    for finding in verify(parse(text), facts=facts):
        for span in (finding.span, *(related.span for related in finding.related)):
            line = lines[span.line - 1]
            covered = line[span.column - 1 : span.end_column - 1]
            instrs = line.removesuffix("{").strip().split(" & ")
            assert covered in (*instrs, *(w for w in line.split() if "=" in w))


def test_many_mistakes_are_all_found_in_one_run():
    """Findings of several areas, in the order of the text."""
    text = edit(
        PIPE,
        ("ranks=0 ", "ranks=1 "),
        ("  W 2\n", ""),
        ("  reduce_grads\n", ""),
        ("  send_grad 1\n", ""),
    )
    codes = [code for code, _ in findings(text)]
    assert codes == ["RHP202", "RHP201", "RHP701", "RHP303", "RHP401"]


def test_a_finding_in_a_shared_stream_is_reported_once():
    """Replicas that run the same text are named together."""
    body = print_plan(make_plan(dp=1, split=True)).split("\n\n")[2:]
    head = print_plan(make_plan(dp=3, split=True)).split("\n\n")[:2]
    text = "\n\n".join([*head, *body]).replace("stream dp=0", "stream dp=0..2")
    assert verify(parse(text)) == []
    (finding,) = verify(parse(edit(text, ("  W 2\n", ""))))
    assert finding.code == "RHP303"
    assert finding.message.endswith("(and in replicas 1,2)")


def test_a_deadlock_is_told_link_by_link():
    """The shortest circle: each link with the place that waits, what for, and why that is late."""
    text = print_plan(make_plan(pp=2, microbatches=1))
    text = edit(
        text,
        ("  send_act 0\n  recv_grad 0\n  BW 0\n", "  recv_grad 0\n  BW 0\n  send_act 0\n"),
    )
    assert render_text(verify(parse(text)), text, "p.plan") == (
        "p.plan:12:3: error[RHP501]: deadlock: dp0.pp0 waits for dp0.pp1, which waits for dp0.pp0\n"
        "12 |   BW 0\n"
        "   |   ^^^^\n"
        "p.plan:12:3: note: dp0.pp0 waits here for `send_grad 0` of dp0.pp1 (line 22), which comes "
        "after `F 0` (line 20)\n"
        "12 |   BW 0\n"
        "   |   ^^^^\n"
        "p.plan:20:3: note: dp0.pp1 waits here for `send_act 0` of dp0.pp0 (line 13), which comes "
        "after `BW 0` (line 12)\n"
        "20 |   F 0\n"
        "   |   ^^^\n"
        "   = hint: swap `BW 0` (line 12) and `send_act 0` (line 13): the circle is gone\n"
    )


def test_the_memory_finding_names_what_is_alive():
    """The line of the peak, the ranks, the need, the capacity and the live set."""
    text = edit(PIPE, ("\n\n", "\nmemory 1200\n\n"))
    (finding,) = verify(parse(text), facts=facts)
    assert finding.message == (
        "dp0.pp0 needs 1.195 KiB on rank 0 at `B 0`; the device has 1.172 KiB"
    )
    assert finding.hint is not None
    assert finding.hint.startswith("alive here: state 1000 bytes; activations of ")


def test_every_code_is_explained_and_tested():
    """The table, the cases here and the syntax tests cover each other."""
    triggered = {case.code for case in CASES}
    elsewhere = {code for code in CODES if code.startswith(("RHP0", "RHP42", "RHP8", "RHP9"))}
    assert triggered | elsewhere == CODES.keys()
    assert explain(
        "RHP501",
    ).startswith("RHP501: deadlock\n\n")  # pyright: ignore[reportOptionalMemberAccess]
    assert explain("RHP999") is None


@pytest.mark.parametrize(
    "edits",
    [
        (("mesh tp=1 pp=2 dp=1", "mesh tp=1000000000 pp=1000000000 dp=1000000000"),),
        (("microbatches=4", "microbatches=1000000000"),),
        (("layers=8", "layers=1000000000"), ("4..7", "4..999999999")),
        (("4..7", "4..999999999"),),
        (("dp=0 pp=0 {", "dp=0..1000000 pp=0 {"),),
        (("mesh tp=1 pp=2 dp=1", "mesh tp=1 pp=1 dp=1"),),
        (("mesh tp=1 pp=2 dp=1", "mesh tp=1 pp=1048576 dp=1"),),
    ],
)
def test_absurd_sizes_do_not_stall_the_verifier(edits):
    """Work is bounded by the text, not by the numbers in it."""
    assert findings(edit(PIPE, *edits))


@given(plans, st.none() | plans)
@settings(max_examples=60, deadline=None)
def test_no_plan_crashes_the_verifier(plan, previous):
    """Whatever can be written down gets findings, not a traceback."""
    verify(parse(print_plan(plan)), previous=previous, facts=facts)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_plan_with_damaged_lines_never_crashes_the_verifier(data):
    """Lines of a right plan deleted, doubled or with another number: findings or silence."""
    lines = data.draw(st.sampled_from([PIPE, WIDE])).split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(1, len(lines) - 1))
        change = data.draw(st.sampled_from(["delete", "double", "number", "number"]))
        if change == "delete":
            del lines[at]
        elif change == "double":
            lines.insert(at, lines[at])
        else:
            number = str(data.draw(st.integers(0, 9)))
            lines[at] = re.sub(r"\d+", number, lines[at], count=data.draw(st.integers(1, 3)))
    try:
        parsed = parse("\n".join(lines))
    except PlanSyntaxError:
        return
    previous = parse(data.draw(st.sampled_from([PIPE, WIDE]))).plan
    for finding in verify(parsed, previous=previous, facts=facts):
        assert finding.code in CODES
