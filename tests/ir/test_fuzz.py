"""Text of any kind is read or refused with places: no traceback, no work beyond its size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from importlib import resources

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from lark import Lark
from plan_build import make_plan
from strategies import plans, schedules

from resihp.errors import PlanSyntaxError
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.expand import expand
from resihp.ir.header import Header, read_header
from resihp.ir.lines import Budget, LineError
from resihp.ir.model import Level
from resihp.ir.parser import parse
from resihp.ir.printer import format_text, print_plan
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.reader import MAX_ERRORS, normalise
from resihp.ir.render import render_text
from resihp.ir.statements import columns_of, spell_instr, spell_program_line
from resihp.ir.syntax import read_instruction, read_program_line, read_source, read_statement

GRAMMAR = resources.files("resihp.ir").joinpath("grammar.lark").read_text(encoding="utf-8")


def read(text: str):
    """What `resihp fmt` reads from any text of the language."""
    header = read_header(normalise(text))
    if isinstance(header, Header) and header.level is Level.PROGRAM:
        return parse_programs(text)[0]
    return parse(text)


def faults_of(text: str) -> tuple[Diagnostic, ...]:
    """Why a text is refused; empty where it is read."""
    try:
        read(text)
    except PlanSyntaxError as error:
        return error.diagnostics or pytest.fail("refused without a reason")
    return ()


def survives(text: str) -> None:
    """Either the text is read, and formatting it is idempotent, or every fault has its place."""
    faults = faults_of(text)
    if not faults:
        once = format_text(read(text))
        assert format_text(read(once)) == once
        return
    lines = normalise(text).split("\n")
    assert len(faults) <= MAX_ERRORS
    for fault in faults:
        assert fault.message.isprintable()
        for span in (fault.span, *(related.span for related in fault.related)):
            assert 1 <= span.line <= len(lines)
            assert 1 <= span.column <= len(lines[span.line - 1]) + 1
            assert span.column < span.end_column
    assert render_text(faults, normalise(text))


def programs() -> str:
    """Two programs of a small plan, one after the other."""
    plan = make_plan(pp=2, dp=2, tp=2)
    return print_program(expand(plan, 0)) + "\n" + print_program(expand(plan, 3))


VALID = st.one_of(plans.map(print_plan), schedules.map(print_plan), st.just(programs()))
SCRAPS = ["{", "}", "\n", " ", "\t", "#", "=", ",", "..", "-", "->", "<-", "&", "[", "]", "@", "0"]
SCRAPS += ["9" * 30, "x", "é", "\x00", "\r", "\xa0", "\ufeff", "\ud800", "plan 1", "program 1"]
SCRAPS += ["stream dp=0 pp=0 {", "  F 0 & B 1", "reconfigure {", "run {", "standby 0..999999999"]


@given(VALID, st.lists(st.tuples(st.floats(0, 1), st.sampled_from(SCRAPS), st.integers(0, 40))))
@settings(max_examples=75, deadline=None)
def test_damaged_texts(text, wounds):
    """[S8] Anything cut out and put in anywhere, at all three levels."""
    for place, scrap, cut in wounds:
        at = int(place * len(text))
        text = text[:at] + scrap + text[at + cut :]
    survives(text)


@given(VALID, st.randoms(use_true_random=False), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_shuffled_lines(text, rng, num_moves):
    """Lines doubled, dropped and moved, also between texts of different levels."""
    lines = [*text.split("\n"), *programs().split("\n")[:12]]
    for _ in range(num_moves):
        line = rng.choice(lines)
        if rng.random() < 0.5:
            lines.remove(line)
        lines.insert(rng.randrange(len(lines) + 1), line)
    survives("\n".join(lines))


@given(st.sampled_from(["plan 1\n", "schedule 1\n", "program 1\n", ""]), st.binary(max_size=200))
@example("", b"\x0b")
@example("plan 1\n", b"nonsense {\n\x0b\n}\n")
@settings(max_examples=100, deadline=None)
def test_random_bytes(header, data):
    """[S8] Not even text."""
    survives(header + data.decode("latin-1"))


@given(st.text(alphabet="plan 1\n#{}stream dp=0FBW&[]->@.,", max_size=80))
@settings(max_examples=100, deadline=None)
def test_random_letters_of_the_language(text):
    """Nearly words."""
    survives("plan 1\n" + text)


# --- what the grammar produces ---------------------------------------------------------------


def lines_of(start: str) -> st.SearchStrategy[str]:
    """Lines that the grammar accepts; words end at a blank, as the terminals' `\\b` demands."""
    grammar = Lark(GRAMMAR, parser="lalr", start=start, maybe_placeholders=False)
    words = {
        terminal.name: st.from_regex(
            terminal.pattern.to_regexp().replace(r"\b", ""), fullmatch=True
        ).map(lambda word: f"{word} ")
        for terminal in grammar.terminals
        if r"\b" in terminal.pattern.to_regexp() or terminal.name == "NAME"
    }
    blanks = {"_BLANK": st.just(" "), "_COMMENT": st.just("\t")}
    return from_lark(grammar, start=start, explicit={**words, **blanks})


def rereads(line: str, respell: Callable[[str], str]) -> None:
    """A line of the grammar is data whose spelling says the same; or a value cannot be."""
    fault = None
    once = ""
    try:
        once = respell(line)
    except LineError as error:
        fault = error
    if fault is None:
        assert respell(once) == once
    else:
        assert fault.code in ("RHP001", "RHP003", "RHP004", "RHP006")
        assert 1 <= fault.column <= len(line) + 1


@given(lines_of("instruction"))
@settings(max_examples=50, deadline=None)
def test_every_instruction_of_the_grammar(line):
    """The grammar says nothing that the reader does not understand."""
    rereads(line, lambda line: " & ".join(map(spell_instr, read_instruction(line))))


@given(lines_of("program_instruction"))
@settings(max_examples=50, deadline=None)
def test_every_program_line_of_the_grammar(line):
    """The same for programs."""
    rereads(line, lambda line: " & ".join(map(spell_program_line, read_program_line(line))))


@given(lines_of("source"))
@settings(max_examples=40, deadline=None)
def test_every_source_of_the_grammar(line):
    """The same for lines of the reconfigure block."""
    rereads(line, lambda line: " ".join(columns_of(read_source(line, Budget(1000)))))


@given(lines_of("statement"))
@settings(max_examples=50, deadline=None)
def test_every_statement_of_the_grammar(line):
    """The same for lines outside of blocks."""
    rereads(line, lambda line: " ".join(columns_of(read_statement(line, Budget(1000)))))


# --- bounds ----------------------------------------------------------------------------------

HEAD = """\
plan 1
model tiny layers=2 hidden=8 heads=2 kv_heads=2 ffn=8 vocab=16
mesh tp=1 pp=1 dp=1
batch microbatches=1 tokens=4
"""


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "stream dp=0 pp=0 {\n" + "  F" + "[" * 30_000 + "\n}\n",
        HEAD + "stream dp=0 pp=0 {\n  F 0" + " & F 0" * 9_000 + "\n}\n",
        HEAD + "stream dp=0 pp=0 {\n  send_act 0" + " -> dp1" * 9_000 + "\n}\n",
        HEAD + "stream dp=0 pp=0 {\n  F " + "9" * 30_000 + "\n}\n",
        HEAD + "stream dp=0 pp=0 {\n" + "  nonsense\n" * 20_000 + "}\n",
        HEAD + "group dp0.pp0 ranks=0 layers=" + "0..1," * 13_000 + "x\n",
        HEAD + "group dp0.pp0 ranks=" + "0..999999999," * 4_000 + "0 layers=0\n",
        HEAD + "lost 0..4194304\n",
        HEAD + "lost 0..9999\n" * 420,
        HEAD + "reconfigure {\n" + "  move layers=0 1 -> \n" * 10_000 + "}\n",
        HEAD + "transport eager=" + "9" * 30_000 + "\n",
        HEAD + ("stream dp=0 pp=0 {\n" * 10_000),
        "program 1\n" * 10_000,
        "plan 1\n" * 20_000,
        "plan " + "1" * 30_000,
    ],
    ids=range(15),
)
def test_hostile_texts_cost_no_more_than_their_size(text):
    """[S2] They are refused, and the reader never holds more than some bytes per character."""
    tracemalloc.start()
    try:
        with pytest.raises(PlanSyntaxError):
            read(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (8 << 20) + 100 * len(text)
