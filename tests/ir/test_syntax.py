"""What the parser says about text that is no plan."""

from __future__ import annotations

import pytest

from resihp.errors import PlanSyntaxError
from resihp.ir.parser import MAX_ERRORS, MAX_LINE, parse
from resihp.ir.render import render_text

HEAD = """\
plan 1
model tiny layers=2 hidden=8 heads=2 kv_heads=2 ffn=8 vocab=16
mesh tp=1 pp=1 dp=1
batch microbatches=1 tokens=4
"""


TRANSPORTS = "`edge`, `pair`, `rank` or `eager=BYTES`"


def faults(text: str) -> list[tuple[str, int, int, str]]:
    """(code, line, column, message) of every fault."""
    with pytest.raises(PlanSyntaxError) as caught:
        parse(text)
    return [(f.code, f.span.line, f.span.column, f.message) for f in caught.value.diagnostics]


def hints(text: str) -> list[str | None]:
    with pytest.raises(PlanSyntaxError) as caught:
        parse(text)
    return [fault.hint for fault in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("line", "code", "column", "message"),
    [
        ("grup dp0.pp0 ranks=0 layers=0", "RHP001", 1, "unknown statement `grup`"),
        (
            "group dp0pp0 ranks=0 layers=0",
            "RHP001",
            7,
            "expected a group such as `dp0.pp1`, but found `dp0pp0`",
        ),
        ("group dp0.pp0 ranks=0 layer=0", "RHP001", 23, "unknown key `layer`"),
        ("group dp0.pp0 ranks=0,,1 layers=0", "RHP001", 23, "expected a number, but found `,`"),
        ("group dp0.pp0 ranks=3..1 layers=0", "RHP001", 21, "the range 3..1 runs backwards"),
        ("group dp0.pp0 ranks=0", "RHP003", 22, "this line lacks `layers=`"),
        (
            "group dp0.pp0 ranks=0 ranks=1 layers=0",
            "RHP004",
            23,
            "`ranks` is given twice in this line",
        ),
        ("group dp0.pp0 ranks=0 layers=0,1", "", 0, ""),
        ("group dp0.pp0 ranks=none layers=0", "RHP001", 21, "`ranks` needs numbers"),
        ("memory 3TB", "RHP001", 8, "expected a size such as `16GiB`, but found `3TB`"),
        ("memory 3", "", 0, ""),
        ("memory 9999999999999999GiB", "RHP006", 8, "the size `9999999999999999GiB` is too large"),
        ("standby", "RHP001", 8, "expected a number, but the line ends"),
        ("standby 1000000001", "RHP006", 9, "the number `1000000001` is larger than 1000000000"),
        (
            "standby 0..999999999",
            "RHP006",
            9,
            "the lists of this text name more than 4194304 numbers",
        ),
        ("order zb h1", "RHP001", 10, "expected the end of the line, but found `h1`"),
        (
            "resume step=1 keep=dp0.pp1",
            "RHP001",
            20,
            "`keep` needs micro-batches such as `0,2@1`, or `none`",
        ),
        ("resume step=1 keep=3", "", 0, ""),
        ("resume step=1 keep=0..2, 4@1 , 0 .. 3 @ 2", "", 0, ""),
        ("resume step=1 keep=3@dp0", "RHP001", 22, "expected a number, but found `dp0`"),
        ("standby 5@1", "RHP001", 11, "`@` and a replica belong to micro-batches alone"),
        ("transport fast", "RHP001", 11, f"expected {TRANSPORTS}, but found `fast`"),
        ("transport eager", "RHP001", 11, f"expected {TRANSPORTS}, but found `eager`"),
        ("transport eager=9999999999999999", "RHP006", 11, f"the size `{16 * '9'}` is too large"),
        ("transport eager = 4MiB", "", 0, ""),
        ("precision fp16", "RHP001", 11, "expected `fp32` or `bf16`, but found `fp16`"),
        ("precision bf16", "", 0, ""),
        ("recompute 0,2..3", "", 0, ""),
        ("recompute all", "RHP001", 11, "expected a number, but found `all`"),
        ("schedule 1f1b", "RHP001", 10, "expected a number, but found `1f1b`"),
        ("schedule 1", "RHP004", 1, "a second `schedule` line"),
        ("run {\n}", "RHP007", 1, "`run` does not belong in a plan"),
        (
            "rank 0 group=dp0.pp0 member=0 tp=1 layers=0 stages=0 of=1",
            "RHP007",
            1,
            "`rank` does not belong in a plan",
        ),
        ("move layers=0..1 3 -> 4", "RHP001", 1, "unknown statement `move`"),
        ("resume step=1..2 keep=none", "RHP001", 13, "`step` takes one number, not a range"),
        ("mesh tp=1 pp=1 dp=1", "RHP004", 1, "a second `mesh` line"),
        ("stream dp=0 pp=0", "RHP005", 1, "`stream` needs a block: end the line with `{`"),
        ("group dp0.pp0 ranks=0 layers=0 {\n}", "RHP005", 1, "`group` takes no block"),
        ("F 0", "RHP001", 1, "unknown statement `F`"),
        ("}", "RHP005", 1, "this `}` closes no block"),
        (
            "group dp9999999999.pp0 ranks=0 layers=0",
            "RHP006",
            7,
            "the numbers of `dp9999999999.pp0` are too large",
        ),
    ],
)
def test_a_bad_line_is_answered_with_place_and_reason(line, code, column, message):
    """One fault, at the character that does not fit, in our own words."""
    text = HEAD + line + "\n"
    if not code:
        parse(text)
    else:
        assert faults(text) == [(code, 5, column, message)]


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("F0", 3, "unknown instruction `F0`", "put a blank before the number: `F 0`"),
        ("F", 4, "expected a number, but the line ends", None),
        ("F 0@", 7, "expected a number, but the line ends", None),
        ("F x", 5, "expected a number, but found `x`", None),
        ("F 0 1", 7, "expected `@` and a replica, `&` or the end of the line, but found `1`", None),
        ("step 0", 8, "expected the end of the line, but found `0`", None),
        ("send_atc 0", 3, "unknown instruction `send_atc`", "did you mean `send_act`?"),
        ("f 0", 3, "unknown instruction `f`", "did you mean `F`?"),
        (
            "mesh tp=1",
            3,
            "unknown instruction `mesh`",
            "`mesh` belongs outside the block; is a `}` missing above?",
        ),
    ],
)
def test_a_bad_instruction_is_answered_with_the_nearest_valid_one(line, column, message, hint):
    """The caret stands inside the line; the hint names what was probably meant."""
    text = f"{HEAD}stream dp=0 pp=0 {{\n  {line}\n}}\n"
    code, at_line, at_column, said = faults(text)[0]
    assert (at_line, at_column, said) == (6, column, message)
    assert code in ("RHP001", "RHP005")
    found = hints(text)[0]
    assert found == hint or (found or "").startswith(hint or "?")


@pytest.mark.parametrize(
    ("line", "code", "column", "message"),
    [
        (
            "reshard layers=0 dp0.pp0 -> 3",
            "RHP001",
            31,
            "expected a group such as `dp0.pp1`, but found `3`",
        ),
        (
            "reshard layers=0,1 dp0.pp0 -> dp0.pp0",
            "RHP001",
            20,
            "`layers` takes one range, not a list",
        ),
        ("move layers=0 3 -> dp0.pp0", "RHP001", 22, "expected a number, but found `dp0.pp0`"),
        ("move layers=0 3 <- 5", "RHP001", 19, "expected `->`, but found `<-`"),
        ("load layers=0 -> dp0.pp0", "RHP003", 27, "this line lacks `step=`"),
        (
            "load layers=0 step=3 dp0.pp0",
            "RHP001",
            24,
            "expected `key=value` or `->`, but found `dp0.pp0`",
        ),
        ("moev layers=0", "RHP001", 3, "unknown line of a `reconfigure` block `moev`"),
    ],
)
def test_a_bad_source_of_state_is_answered(line, code, column, message):
    """`reshard` names groups, `move` ranks, `load` a saved version and a group."""
    assert faults(f"{HEAD}reconfigure {{\n  {line}\n}}\n") == [(code, 6, column, message)]


def test_all_faults_of_a_text_are_reported():
    """Reading goes on after a fault: lines, blocks and missing braces in one run."""
    text = """\
plan 1
modle x
mesh tp=1,2 pp=1 dp=1
stream dp=0 pp=0 {
  F0
  stepp
reconfigure {
  reshard layers=0..1 dp0.pp0 - dp0.pp0
"""
    assert [(code, line) for code, line, _, _ in faults(text)] == [
        ("RHP001", 2),
        ("RHP001", 3),
        ("RHP001", 5),
        ("RHP001", 6),
        ("RHP005", 7),
        ("RHP005", 7),
        ("RHP001", 8),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty; a plan starts with the line `plan 1`"),
        ("# only a comment\n\n", "the text is empty; a plan starts with the line `plan 1`"),
        ("mesh tp=1\n", "a plan starts with the line `plan 1`"),
        ("plan 2\nwhatever { { {\n", "this is a plan of version 2; this program reads version 1"),
        ("plan one\n", "a plan starts with the line `plan 1`"),
        ("plan 1 2\n", "a plan starts with the line `plan 1`"),
        ("plan 0\n", "this is a plan of version 0; this program reads version 1"),
        ("schedule 7\n", "this is a schedule of version 7; this program reads version 1"),
        ("Plan 1\n", "a plan starts with the line `plan 1`"),
    ],
)
def test_another_version_gets_one_message(text, message):
    """What cannot be read at all is not read further."""
    ((code, _, _, said),) = faults(text)
    assert (code, said) == ("RHP002", message)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Plan 1\n", "did you mean `plan`?"),
        ("shedule 1\n", "did you mean `schedule`?"),
        ("plan one\n", "after `plan` the line has the version, and nothing else: `plan 1`"),
        ("0F0,0F1,,0B0\n", "is this a CSV file of torch? its name must end in `.csv`"),
        (
            "mesh tp=1\n",
            "the first line is one of `schedule 1`, `plan 1`, `program 1`; found `mesh tp=1`",
        ),
    ],
)
def test_a_strange_first_line_is_answered_with_what_was_meant(text, hint):
    """The hint says what a first line looks like."""
    assert hints(text) == [hint]


def test_a_program_is_no_plan():
    """It is known as what it is, not read as something else."""
    ((code, line, column, said),) = faults("program 1\n")
    assert (code, line, column) == ("RHP007", 1, 1)
    assert said == "this is a program; a plan starts with the line `plan 1`"


@pytest.mark.parametrize("keyword", ["model", "mesh", "batch"])
def test_a_missing_statement_is_named(keyword):
    """`model`, `mesh` and `batch` are required."""
    text = "".join(line for line in HEAD.splitlines(True) if not line.startswith(keyword))
    assert faults(text) == [("RHP003", 1, 1, f"the plan has no `{keyword}` line")]


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        (
            "stream dp=0 pp=0 { F 0\n}\n",
            5,
            "the first instruction of a block starts on the line after `{`",
        ),
        ("stream dp=0 pp=0 {\n  F 0 }\n", 6, "`}` stands on a line of its own"),
        ("stream dp=0 pp=0 {}\n", 5, "`}` stands on a line of its own"),
        ("stream dp=0 pp=0 {\n  F 0\n", 5, "this block is never closed: `}` is missing"),
        ("stream dp=0 pp=0 {\n  F 0 {\n}\n", 6, "a block cannot open inside a block"),
        ("{\n}\n", 5, "`{` ends the line of the block's head"),
    ],
)
def test_braces_are_where_they_belong(body, line, message):
    """A block's braces are part of the line structure."""
    assert ("RHP005", line, message) in [(c, at, m) for c, at, _, m in faults(HEAD + body)]


def test_the_number_of_faults_is_bounded():
    """A file that is no plan at all does not flood the terminal."""
    text = HEAD + "nonsense\n" * 1000
    assert len(faults(text)) == MAX_ERRORS


@pytest.mark.parametrize(
    "text",
    [
        "plan 1\n" + "#" * (MAX_LINE + 1),
        HEAD + "standby " + "9" * 60_000,
        HEAD + "standby 0..999999999\n" * 1000,
        HEAD + "{" * 60_000,
        HEAD + "stream dp=0 pp=0 {" + "#" * 60_000,
        HEAD + "stream dp=0 pp=0 {\n" + "# {\n" * 60_000,
    ],
)
def test_hostile_text_is_refused_in_bounded_time(text):
    """Limits are checked before the work that they limit: none of these runs into the timeout."""
    assert faults(text)


def test_a_fault_is_rendered_with_its_line_and_caret():
    """Like a good compiler's message."""
    text = f"{HEAD}stream dp=0 pp=0 {{\n  F 0\n  send_atc 0\n}}\n"
    with pytest.raises(PlanSyntaxError) as caught:
        parse(text, path="a.plan")
    assert str(caught.value) == "a.plan:7:3: unknown instruction `send_atc` (1 fault)"
    assert render_text(caught.value.diagnostics, text, "a.plan") == (
        "a.plan:7:3: error[RHP001]: unknown instruction `send_atc`\n"
        "7 |   send_atc 0\n"
        "  |   ^^^^^^^^\n"
        "  = hint: did you mean `send_act`?\n"
    )


@pytest.mark.parametrize("strange", ["\x0b", "\x1c", "\u2003", "\x85", "\x00"])
def test_blanks_of_other_alphabets_are_a_first_line_like_any_other(strange):
    """Only blank and tab mean nothing; whatever else stands there is no header."""
    with pytest.raises(PlanSyntaxError) as caught:
        parse(strange)
    assert [finding.code for finding in caught.value.diagnostics] == ["RHP002"]


@pytest.mark.parametrize("strange", ["\x0b", "\x1c", "\u2003", "\x85", "\x00"])
def test_blanks_of_other_alphabets_are_no_statement(strange):
    """A line of one is refused at its place."""
    with pytest.raises(PlanSyntaxError) as caught:
        parse(f"plan 1\n{strange}\n")
    assert "RHP001" in {finding.code for finding in caught.value.diagnostics}
