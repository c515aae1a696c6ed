"""Text and plan are two forms of the same thing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from strategies import plans

from resihp.errors import PlanSyntaxError
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.lines import Budget
from resihp.ir.model import GroupName, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import format_text, print_plan
from resihp.ir.statements import spell_instr, spell_numbers, spell_size
from resihp.ir.syntax import read_statement

UGLY = """\
\ufeff# a plan by hand\r
\r
\r
plan   1\r
model tiny-llama  layers=6 heads=8 hidden = 256 kv_heads=2 ffn=688 vocab=272\r
mesh tp=2 pp=2 dp=2   # the healthy layout\r
batch microbatches=4 tokens=256#no blank
memory 1024MiB
group dp0.pp0 ranks=0 , 1 layers=2
group dp10.pp1 ranks=4,5,6,7 layers=3..5  # x
lost 5


stream dp=0,1,2,5 pp=0 {   # {braces} in a comment

# lonely
\tF  0
  send_act 0 @ 1   # why

  step
}   # end

# last words

"""
TIDY = """\
# a plan by hand

plan 1
model tiny-llama layers=6 hidden=256 heads=8 kv_heads=2 ffn=688 vocab=272
mesh tp=2 pp=2 dp=2              # the healthy layout
batch microbatches=4 tokens=256  #no blank
memory 1GiB
group dp0.pp0  ranks=0,1  layers=2..2
group dp10.pp1 ranks=4..7 layers=3..5  # x
lost 5

stream dp=0..2,5 pp=0 {  # {braces} in a comment

  # lonely
  F 0
  send_act 0@1  # why

  step
}  # end

# last words
"""


@given(plans)
@settings(max_examples=80, deadline=None)
def test_printing_then_parsing_gives_the_plan_back(plan: Plan):
    """parse(print(plan)) is plan, and printing again gives the same bytes."""
    text = print_plan(plan)
    parsed = parse(text)
    assert parsed.plan == plan
    assert print_plan(parsed.plan) == text


@given(plans)
@settings(max_examples=30, deadline=None)
def test_a_printed_plan_is_formatted(plan: Plan):
    """The printer's text is a fixed point of the formatter."""
    text = print_plan(plan)
    assert format_text(parse(text)) == text


def test_formatting_keeps_comments_and_order():
    """Spacing, spelling and blank lines become canonical; what was said stays."""
    assert format_text(parse(UGLY)) == TIDY


def test_formatting_twice_changes_nothing():
    """Formatting is idempotent and keeps the plan."""
    once = format_text(parse(UGLY))
    assert format_text(parse(once)) == once
    assert parse(once).plan == parse(UGLY).plan


@given(plans, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_formatting_is_idempotent_on_ragged_text(plan: Plan, rng: random.Random):
    """Random blanks, comments and blank lines: one pass reaches the fixed point."""
    ragged: list[str] = []
    for line in print_plan(plan).split("\n"):
        blanks = line.replace(" ", " " * rng.randint(1, 3)) + " " * rng.randint(0, 2)
        ragged.append(blanks + ("# note {" if rng.random() < 0.2 else ""))
        ragged.extend([""] * rng.choice([0, 0, 1, 3]))
    parsed = parse("\n".join(ragged))
    assert parsed.plan == plan
    once = format_text(parsed)
    assert format_text(parse(once)) == once


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_lists_of_numbers_keep_their_order(numbers):
    """Runs are abbreviated, nothing is sorted."""
    statement = read_statement(f"standby {spell_numbers(numbers)}", Budget())
    assert list(statement.ranks) == numbers  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (1, "1"), (1024, "1KiB"), (3 << 29, "1536MiB"), (2 << 30, "2GiB"), (1000, "1000")],
)
def test_sizes_take_the_largest_whole_unit(num_bytes, text):
    """No fraction is ever written."""
    assert spell_size(num_bytes) == text


def test_places_point_at_the_text():
    """Every instruction's span covers its mnemonic and operand."""
    plan = make_plan(pp=3, dp=2, tp=2, degrees={GroupName(1, 1): 1}, gone={})
    text = print_plan(plan)
    parsed = parse(text)
    lines = text.split("\n")
    for stream, source in zip(plan.streams, parsed.streams, strict=True):
        for index, instr in enumerate(stream.body):
            span = source.span(index)
            found = lines[span.line - 1][span.column - 1 : span.end_column - 1]
            assert found == spell_instr(instr)


def faults_of(text: str) -> Sequence[Diagnostic]:
    """Why `text` is no plan; empty if it is one."""
    try:
        parse(text)
    except PlanSyntaxError as error:
        return error.diagnostics or pytest.fail("refused without a reason")
    return ()


@given(st.text(alphabet="plan 1\n#{}stream dp=0FBW@.,", max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_crashes_the_parser(text):
    """Either a plan or a PlanSyntaxError with places inside the text."""
    num_lines = text.count("\n") + 2
    assert all(1 <= fault.span.line <= num_lines for fault in faults_of("plan 1\n" + text))


@given(plans, st.data())
@settings(max_examples=80, deadline=None)
def test_a_damaged_plan_never_crashes_the_parser(plan: Plan, data):
    """One character deleted, replaced or inserted anywhere: plan or diagnostics."""
    text = print_plan(plan)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", "{", "}", "\n", "9", "x", " ", "#", "=", ".", "\t", "é"]))
    damaged = text[:at] + new + text[at + data.draw(st.integers(0, 1)) :]
    faults_of(damaged)
