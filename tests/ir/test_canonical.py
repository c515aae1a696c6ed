"""What is read without the grammar reads as the grammar reads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from strategies import byte_counts, instructions, names, numbers, pairs, plans, sources

from resihp.ir import canonical, canonical_statements, reading, syntax
from resihp.ir.lines import BLANKS, Budget, LineError, code_of
from resihp.ir.model import Plan
from resihp.ir.printer import print_plan
from resihp.ir.statements import columns_of, spell_instr, spell_numbers, spell_size
from resihp.ir.structure import split_tidy
from resihp.ir.structure_grammar import split_by_grammar

ODD = ["", " ", "\t", "0", "00", "1", "-", ",", "..", "@", "&", "[", "]", "=", "#", "x", "9" * 10]
ODD += ["\n", "{", "}", "F", "dp0", "->", "<-", "\xa0", "١"]
"""What a line may be damaged with; the last one is a digit, but not of the language."""


def damaged(line: str, data: st.DataObject) -> str:
    """`line` with up to two small faults."""
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(line)))
        odd = data.draw(st.sampled_from(ODD))
        line = line[:at] + odd + line[at + data.draw(st.integers(0, 2)) :]
    return line.replace("\n", "")


def agree(fast: Callable[[str], object], slow: Callable[[str], object], line: str) -> None:
    """Either the fast way leaves the line to the grammar, or both say the same of it."""
    known = fast(line)
    if known is None:
        return
    try:
        assert slow(line) == known
    except LineError as error:
        pytest.fail(f"{line!r} is refused: {error}")


def agree_at_any_spacing(
    fast: Callable[[str], object], slow: Callable[[str], object], line: str, data: st.DataObject
) -> None:
    """Blanks between words and a comment change nothing; what is refused is refused alike."""
    spaced = line.replace(" ", data.draw(st.sampled_from([" ", "  ", "\t", " \t "])))
    spaced += data.draw(st.sampled_from(["", " ", "\t# {a note}", "#"]))
    assert said(fast, spaced) == said(slow, code_of(spaced))


def said(read: Callable[[str], object], line: str) -> object:
    """What a way of reading makes of a line, or where it finds what fault."""
    try:
        return read(line)
    except LineError as error:
        return error.column, error.end_column, error.message, error.hint


def short(line: str) -> bool:
    """Whether no number is one digit longer than the fast way takes."""
    return "1000000000" not in line


@given(st.one_of(instructions.map(lambda instr: (instr,)), pairs), st.data())
@settings(max_examples=200, deadline=None)
def test_instructions(instrs, data):
    """Canonical lines are taken, damaged ones are left or read alike."""
    line = "  " + " & ".join(map(spell_instr, instrs))
    assert canonical.read_instruction(line) == instrs or not short(line)
    assert syntax.read_instruction(line) == instrs
    line = damaged(line, data)
    agree(canonical.read_instruction, syntax.read_instruction, line)
    if code_of(line).strip(BLANKS):
        agree_at_any_spacing(reading.read_instruction, syntax.read_instruction, line, data)


@given(sources, st.data())
@settings(max_examples=100, deadline=None)
def test_sources_of_state(source, data):
    """Lines of the reconfigure block."""
    line = "  " + " ".join(columns_of(source))
    assert canonical.read_source(line) == source or not short(line)

    def slow(line: str) -> object:
        return syntax.read_source(line, Budget())

    assert slow(line) == source
    line = damaged(line, data)
    agree(canonical.read_source, slow, line)
    if code_of(line).strip(BLANKS):
        agree_at_any_spacing(lambda line: reading.read_source(line, Budget()), slow, line, data)


peers = st.lists(
    st.one_of(
        numbers.map(str), st.tuples(numbers, numbers, numbers).map(lambda n: "{}:{}/{}".format(*n))
    ),
    min_size=1,
    max_size=3,
).map(",".join)


elements = st.sampled_from(["f32", "bf16"])


@given(instructions, st.sampled_from(["->", "<-"]), peers, numbers, numbers, st.data())
@settings(max_examples=200, deadline=None)
def test_lines_of_programs(instr, arrow, peers, tokens, hidden, data):
    """Transfers with peers and tensors, everything else without."""
    line = "  " + spell_instr(instr).partition(" ->")[0].partition(" <-")[0]
    if instr.op.is_transfer:
        line += f" {arrow} {peers} {tokens}x{hidden}x{data.draw(elements)}"
    agree(canonical.read_program_line, syntax.read_program_line, line)
    line = damaged(line, data)
    agree(canonical.read_program_line, syntax.read_program_line, line)
    if code_of(line).strip(BLANKS):
        agree_at_any_spacing(reading.read_program_line, syntax.read_program_line, line, data)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_printed_statements_are_taken(plan: Plan):
    """A printed plan needs no grammar, and takes as much from the budget as the grammar does."""
    for line in print_plan(plan).split("\n"):
        head = line.removesuffix(" {")
        if not head or head.startswith((" ", "}")) or not short(head):
            continue
        quick, slow = Budget(), Budget()
        known = canonical_statements.read_statement(head, quick)
        assert known is not None
        assert known == syntax.read_statement(head, slow)
        assert quick.numbers == slow.numbers


words = st.one_of(
    st.sampled_from(
        [
            "plan 1",
            "schedule 1",
            "program 1",
            "model tiny layers=2 hidden=8 heads=2 kv_heads=2 ffn=8 vocab=16",
            "mesh tp=1 pp=2 dp=3",
            "batch microbatches=1 tokens=4",
            "resume step=7 keep=none",
            "group dp0.pp1  ranks=0..3,7 layers=0..1,6..7",
            "stream dp=0,2..4 pp=1",
            "transport eager=4MiB",
            "transport rank",
            "precision fp32",
            "precision bf16",
            "recompute 0,2..3",
            "recompute 3..1",
            "standby 3,5..7",
            "lost 4",
            "returned 4,6..8",
            "reconfigure",
            "run",
        ]
    ),
    names.map(lambda name: f"order {name}"),
    byte_counts.map(lambda size: f"memory {spell_size(size)}"),
    st.lists(numbers, min_size=1, max_size=5).map(lambda ranks: f"lost {spell_numbers(ranks)}"),
)


@given(words, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_statements(line, data):
    """They are left to the grammar, or read as it reads them."""

    def slow(line: str) -> object:
        return syntax.read_statement(line, Budget())

    line = damaged(line, data)
    agree(lambda line: canonical_statements.read_statement(line, Budget()), slow, line)
    if code_of(line).strip(BLANKS):
        agree_at_any_spacing(
            lambda line: reading.read_statement(code_of(line), 1, Budget()), slow, line, data
        )


@pytest.mark.parametrize(
    "line",
    [
        "stream dp=4..2 pp=0",
        "stream dp=0..20 pp=0",
        "stream dp=0, pp=0",
        "stream dp=0 pp=1234567890",
        "stream dp=01 pp=0",
        "group dp0.pp0 ranks=3..1 layers=0",
        "group dp0.pp0 ranks=0 layers=3..1",
        "group dp0.pp0 layers=0 ranks=0",
        "group dp0.pp0 ranks=0 layers=0 # note",
        "standby 0..20",
        "lost 3..1",
        "memory 9999999999999999",
    ],
)
def test_odd_statements_are_left_to_the_grammar(line):
    """Which knows what is wrong with them, if anything; nothing is taken from the numbers."""
    budget = Budget(20)
    assert canonical_statements.read_statement(line, budget) is None
    assert budget.numbers == 20


@given(plans)
@settings(max_examples=30, deadline=None)
def test_printed_structure_is_tidy(plan: Plan):
    """Lines and blocks of a printed plan are found without the grammar."""
    text = print_plan(plan)
    assert split_tidy(text) == split_by_grammar(text)[0]


@given(
    st.lists(st.sampled_from(["a", " b", "x {", "{", "}", "  }", "#", "\t", "\n", "\n", "\xa0"]))
)
@settings(max_examples=500, deadline=None)
def test_structure(parts):
    """Where the fast way finds lines and blocks, the grammar finds the same and no fault."""
    text = "".join(parts)
    tidy = split_tidy(text)
    if tidy is not None:
        assert split_by_grammar(text) == (tidy, [])


@pytest.mark.parametrize(
    "text",
    [
        " " * 60_000 + "}",
        "a" * 60_000 + "}",
        "a {" + "\n" * 60_000 + "#}",
        "a {" + "\n b" * 30_000,
        "a {\n}\n" * 20_000 + "}",
        "# {\n" * 20_000 + "{",
    ],
)
def test_untidy_text_is_left_soon(text):
    """The fast way looks at every character a few times at most: no test runs into a timeout."""
    for _ in range(20):
        assert split_tidy(text) is None


@pytest.mark.parametrize("verb", ["verify", "fmt", "show"])
def test_a_printed_plan_is_read_without_lark(verb, tmp_path):
    """The grammar takes longer to load than the plan to read, so verbs start without it."""
    path = tmp_path / "a.plan"
    path.write_text(print_plan(make_plan(pp=2, dp=2, tp=2)), encoding="utf-8")
    code = (
        "import sys\nfrom resihp.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "assert 'lark' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, verb, str(path)], capture_output=True, text=True, check=True
    )
