"""Programs as text: round trips, several in one text, what is refused."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_build import make_plan
from staged_plans import random_staged
from strategies import layer_ranges, models, names, numbers, places, precisions, rank_lists

from resihp.cli import main
from resihp.cli.plan_files import parse_any
from resihp.errors import PlanSyntaxError
from resihp.ir import canonical
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Mesh, Op
from resihp.ir.printer import format_text, print_plan
from resihp.ir.program import Program, ProgramInstr, TensorType, Transfer
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.statements import spell_program_line
from resihp.ir.syntax import read_program_line

seeds = st.integers(0, 10**9).map(random.Random)

_operands = {"microbatch": numbers, "home": numbers, "stage": numbers}
computes = st.builds(ProgramInstr, op=st.sampled_from([Op.F, Op.B, Op.W, Op.BW]), **_operands)
of_stages = st.builds(
    ProgramInstr,
    op=st.sampled_from([Op.REDUCE_GRADS, Op.GATHER_PARAMS, Op.FREE_PARAMS]),
    stage=numbers,
)
transfers = st.builds(
    lambda op, microbatch, home, stage, messages, tensor: ProgramInstr(
        op=op,
        microbatch=microbatch,
        home=home,
        stage=stage,
        transfers=messages,
        tensor=tensor,
        num_chunks=messages[0].num_chunks,
    ),
    st.sampled_from([op for op in Op if op.is_transfer]),
    numbers,
    numbers,
    numbers,
    st.lists(st.builds(Transfer, numbers, numbers, numbers), min_size=1, max_size=4).map(tuple),
    st.builds(TensorType, numbers, numbers, st.sampled_from(["f32", "bf16"])),
)
instrs = st.one_of(computes, of_stages, transfers, st.just(ProgramInstr(op=Op.STEP)))
programs = st.builds(
    Program,
    model=models,
    mesh=st.builds(Mesh, tp=numbers, pp=numbers, dp=numbers),
    batch=st.builds(Batch, microbatches=numbers, tokens=numbers),
    rank=numbers,
    group=places,
    tp_index=numbers,
    tp=numbers,
    layers=st.lists(layer_ranges, min_size=1, max_size=3).map(tuple),
    stages=st.lists(numbers, min_size=1, max_size=3).map(tuple),
    num_stages=numbers,
    instrs=st.lists(instrs, max_size=12).map(tuple),
    precision=precisions,
    recompute=st.just(()) | rank_lists,
)


def programs_of(rng: random.Random) -> list[Program]:
    plan = random_staged(rng).plan
    return [expand(plan, rank) for rank in plan.active_ranks]


@given(programs)
@settings(max_examples=100, deadline=None)
def test_any_program_comes_back_from_its_text(program: Program):
    """Right or wrong, and printing it again gives the same bytes."""
    text = print_program(program)
    (parsed,) = parse_programs(text)
    assert parsed.program == program
    assert print_program(parsed.program) == text
    assert format_text(parsed) == text


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_the_programs_of_a_plan_come_back_from_one_text(rng: random.Random):
    """Scatters know their chunks again, pairs stay pairs, and `fmt` leaves the text alone."""
    made = programs_of(rng)
    text = "\n".join(map(print_program, made))
    parsed = parse_programs(text)
    assert [one.program for one in parsed] == made
    assert format_text(parsed[0]) == text


def test_a_pair_stands_in_one_line():
    """The first one says that the next is computed with it."""
    program = expand(make_plan(), 0)
    first = ProgramInstr(op=Op.F, microbatch=1, home=0, stage=0, paired=True)
    second = ProgramInstr(op=Op.BW, microbatch=0, home=0, stage=0)
    text = print_program(replace(program, instrs=(first, second)))
    assert "\n  F 1@0 & BW 0@0\n" in text
    assert parse_programs(text)[0].program.instrs == (first, second)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_places_point_at_the_text(rng: random.Random):
    """Of every instruction, and of the lines outside the block, in every part of the text."""
    text = "# all of them\n\n" + "\n\n".join(map(print_program, programs_of(rng)))
    lines = text.split("\n")
    for parsed in parse_programs(text):
        sole = parsed.program.stages[0] if len(parsed.program.stages) == 1 else None
        for index, instr in enumerate(parsed.program.instrs):
            span = parsed.run.span(index)
            found = lines[span.line - 1][span.column - 1 : span.end_column - 1]
            assert found.startswith(instr.op.mnemonic)
            assert (f"[{instr.stage}]" in found) == (instr.op.has_stage and instr.stage != sole)
        span = parsed.statement("rank")
        assert lines[span.line - 1].startswith(f"rank {parsed.program.rank} ")


@given(st.one_of(computes, of_stages, transfers))
def test_the_fast_way_and_the_grammar_read_lines_of_programs_alike(instr: ProgramInstr):
    """The canonical spelling, which is read without the grammar, means what the grammar says."""
    program = expand(make_plan(), 0)
    (line,) = [
        line
        for line in print_program(replace(program, instrs=(instr,))).split("\n")
        if line.startswith("  ")
    ]
    known = canonical.read_program_line(line)
    assert known is not None or 10**9 in numbers_in(instr)
    (read,) = read_program_line(line)
    assert known in (None, (read,))
    assert f"  {spell_program_line(read)}" == line


def numbers_in(instr: ProgramInstr) -> list[int | None]:
    chunks = [number for transfer in instr.transfers for number in transfer]
    sizes = [] if instr.tensor is None else [instr.tensor.tokens, instr.tensor.hidden]
    return [instr.microbatch, instr.home, instr.stage, *chunks, *sizes]


def test_defaults_may_be_left_out():
    """A micro-batch without a home is at home in the replica of the group."""
    plan = make_plan(dp=2)
    text = print_program(expand(plan, 3))
    assert " 0@1" in text
    assert parse_programs(text.replace("@1", ""))[0].program == expand(plan, 3)


HEAD = print_program(expand(make_plan(), 0)).split("run {")[0]


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        (HEAD, 1, "RHP003"),
        (HEAD + "run {\n}\n" + HEAD + "run {\n  F x\n}\n", 18, "RHP001"),
        (HEAD + "run {\n}\n\nrun {\n}\n", 11, "RHP004"),
        (HEAD + "run {\n  F 0\n", 8, "RHP005"),
        (HEAD + "run {\n  send_act 0 -> dp1\n}\n", 9, "RHP001"),
        (HEAD + "run {\n  send_act 0 -> 1:0/2\n}\n", 9, "RHP001"),
        (HEAD + "order 1f1b\nrun {\n}\n", 8, "RHP007"),
        (HEAD + "run {\n}\n" + HEAD.replace("program 1", "program 2") + "run {\n}\n", 10, "RHP002"),
        (HEAD + "run {\n}\nplan 1\n", 10, "RHP004"),
        (HEAD.replace("stages=0", "stages=0..9999999") + "run {\n}\n", 6, "RHP006"),
    ],
)
def test_faults_have_their_line(text: str, line: int, code: str):
    """Also in the second program of a text."""
    found = faults_of(text)
    assert [(fault.span.line, fault.code) for fault in found] == [(line, code)]


def test_the_lists_of_all_programs_share_one_bound():
    """Many programs cannot hold more numbers than one."""
    text = (HEAD.replace("stages=0", "stages=0..2999999") + "run {\n}\n") * 2
    assert [fault.code for fault in faults_of(text)] == ["RHP006"]


def faults_of(text: str) -> tuple[Diagnostic, ...]:
    try:
        parse_programs(text)
    except PlanSyntaxError as error:
        return error.diagnostics or pytest.fail("refused without a reason")
    return ()


@given(seeds, st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_text_never_crashes_the_parser(rng: random.Random, data):
    """One character deleted, replaced or inserted anywhere: programs or diagnostics."""
    text = "".join(map(print_program, programs_of(rng)[:2]))
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", "{", "}", "\n", "9", "x", " ", "#", "=", ":", "/", "&"]))
    damaged = text[:at] + new + text[at + data.draw(st.integers(0, 1)) :]
    num_lines = damaged.count("\n") + 2
    assert all(1 <= fault.span.line <= num_lines for fault in faults_of(damaged))
    with contextlib.suppress(PlanSyntaxError):
        parse_any(damaged, "x.program")


@given(names)
@settings(max_examples=5)
def test_a_plan_is_no_program(name: str):
    """The level of a text is in its first line."""
    plan = make_plan()
    plan = replace(plan, model=replace(plan.model, name=name))
    assert [fault.code for fault in faults_of(print_plan(plan))] == ["RHP007"]


def test_fmt_formats_programs(tmp_path, capsys):
    """Spacing and defaults as written; comments stay."""
    file = tmp_path / "two.program"
    tidy = print_program(expand(make_plan(), 0)) + "\n# the other one\n"
    tidy += print_program(expand(make_plan(), 1))
    file.write_text(tidy.replace("  F 0@0", "\tF   0 @ 0").replace("F 1@0\n", "F 1@0   # why\n"))
    assert main(["fmt", str(file)]) == 0
    assert capsys.readouterr().out == tidy.replace("F 1@0\n", "F 1@0  # why\n")
