"""What the parser says about instructions with stages, peers and pairs, at each level."""

from __future__ import annotations

import pytest

from resihp.errors import PlanSyntaxError
from resihp.ir.lines import LineError
from resihp.ir.model import Instr, Op
from resihp.ir.parser import parse
from resihp.ir.program import TensorType, Transfer
from resihp.ir.syntax import read_program_line

HEAD = """\
plan 1
model tiny layers=2 hidden=8 heads=2 kv_heads=2 ffn=8 vocab=16
mesh tp=1 pp=1 dp=1
batch microbatches=1 tokens=4
"""
STAGE = "the stage stands right after the instruction, in `[ ]`: "
TWO = "one instruction a line, or two that overlap with `&` between them"


def the_fault(line, level="plan"):
    """(column, message, hint) of the only fault of a text with this instruction."""
    head = HEAD.replace("plan", level)
    with pytest.raises(PlanSyntaxError) as caught:
        parse(f"{head}stream dp=0 pp=0 {{\n  {line}\n}}\n")
    (fault,) = caught.value.diagnostics
    assert fault.span.line == 6
    return fault.code, fault.span.column, fault.message, fault.hint


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("F(2) 3", 4, "expected a number, but found `(`", f"{STAGE}`F[2]`"),
        ("F<2> 3", 4, "expected a number, but found `<`", f"{STAGE}`F[2]`"),
        ("F[2 3", 7, "expected `]`, but found `3`", None),
        ("F[2]", 7, "expected a number, but the line ends", None),
        ("F[] 3", 5, "expected a number, but found `]`", None),
        (
            "F 3[2]",
            6,
            "expected `@` and a replica, `&` or the end of the line, but found `[`",
            f"{STAGE}`F[2]`",
        ),
        ("step[2]", 7, "`step` is for all stages: it takes none", None),
        (
            "reduce_grads 2",
            16,
            "expected `[` and a stage or the end of the line, but found `2`",
            "a stage stands in `[ ]`: `reduce_grads[2]`",
        ),
        (
            "reduce_grads[2] 3",
            19,
            "`reduce_grads` is for all micro-batches: it takes none",
            None,
        ),
        ("gather_params[x]", 17, "expected a number, but found `x`", None),
    ],
)
def test_a_stage_in_the_wrong_place_is_answered(line, column, message, hint):
    """Wrong brackets, no number, or an instruction without stages."""
    assert the_fault(line) == ("RHP001", column, message, hint)


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("F 3 -> dp1", 7, "only sends take `->`, not `F`", None),
        ("BW[1] 3@1 -> dp1", 13, "only sends take `->`, not `BW`", None),
        ("scatter_act 3 -> dp1", 17, "only sends take `->`, not `scatter_act`", None),
        ("F 3 <- dp1", 7, "only receives take `<-`, not `F`", None),
        ("send_act 3 <- dp1", 14, "a send says where the tensor goes, with `->`", None),
        (
            "recv_act[1] 3@1 -> dp1",
            19,
            "a receive says where the tensor comes from, with `<-`",
            None,
        ),
        (
            "send_act 3 -> 6",
            17,
            "expected a replica such as `dp1`, but found `6`",
            "a plan names the replica at the other end, not its ranks: `dp6`",
        ),
        (
            "send_act 3 -> 6:0/2,7:1/2 128x256xf32",
            17,
            "expected a replica such as `dp1`, but found `6`",
            "a plan names the replica at the other end, not its ranks: `dp6`",
        ),
        (
            "send_act 3 -> dp1.pp0",
            20,
            "expected the end of the line, but found `.`",
            "the position follows from the stage; name the replica only",
        ),
        ("send_act 3 ->", 16, "expected a replica such as `dp1`, but the line ends", None),
        ("send_act -> dp1", 12, "expected a number, but found `->`", None),
        (
            "send_act 3 dp1",
            14,
            "expected `@` and a replica, `->` or the end of the line, but found `dp1`",
            None,
        ),
    ],
)
def test_a_wrong_other_end_is_answered(line, column, message, hint):
    """The right arrow of the instruction, and what stands after it in a plan."""
    assert the_fault(line) == ("RHP001", column, message, hint)


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("F 0 & B 1 & W 2", 13, "a pair has two instructions, no more", None),
        ("F 0 & send_act 1", 9, "only F, B, W and BW make pairs, not `send_act`", None),
        ("send_act 0 & F 1", 14, "only F, B, W and BW make pairs, not `send_act`", None),
        ("F 0 & step", 9, "only F, B, W and BW make pairs, not `step`", None),
        ("F 0 &", 8, "expected F, B, W or BW, but the line ends", None),
        ("F 0 && B 1", 8, "expected F, B, W or BW, but found `&`", None),
        (
            "F 0; B 1",
            6,
            "expected `@` and a replica, `&` or the end of the line, but found `;`",
            TWO,
        ),
        (
            "F 0 B 1",
            7,
            "expected `@` and a replica, `&` or the end of the line, but found `B`",
            TWO,
        ),
    ],
)
def test_a_wrong_pair_is_answered(line, column, message, hint):
    """Two instructions that compute, with one `&` between them."""
    assert the_fault(line) == ("RHP001", column, message, hint)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("I 0", "torch's `I` is `B` here"),
        ("2B13", "torch's `2B13` is `BW[2] 13` here"),
        ("0SEND_F1", "torch's `0SEND_F1` is `send_act[0] 1` here"),
        ("UNSHARD", "torch's `UNSHARD` is `gather_params` here"),
    ],
)
def test_the_words_of_torch_are_translated(line, hint):
    """Who comes from its CSV files learns what an action is called here."""
    assert the_fault(line)[3] == hint


@pytest.mark.parametrize("blank", ["\xa0", "\x0b", "\x0c", "\u2003", "\r"])
def test_what_only_looks_blank_is_named(blank):
    """Characters that nobody sees are shown as what they are, wherever they stand."""
    escaped = repr(blank)[1:-1]
    assert the_fault(f"F{blank}0")[1:3] == (4, f"expected a number, but found `{escaped}`")
    assert the_fault(f"F 0{blank} ")[2].endswith(f"but found `{escaped}`")
    assert the_fault(f"{blank} F 0")[2] == f"unknown instruction `{escaped}`"


@pytest.mark.parametrize("line", ["send_act 0", "gather_params", "reduce_grads[0]", "  step"])
def test_a_schedule_only_computes(line):
    """Everything else is what lowering adds."""
    code, column, message, hint = the_fault(line, level="schedule")
    word = line.split()[0].partition("[")[0]
    assert (code, column) == ("RHP007", 3 + len(line) - len(line.lstrip()))
    assert message == f"`{word}` does not belong in a schedule"
    assert hint is not None
    assert "resihp lower" in hint


def test_a_pair_has_two_places():
    """Each instruction's span is its own part of the line."""
    line = "\tF[0] 3  &   BW[1] 2@1   # overlapped"
    parsed = parse(f"{HEAD}stream dp=0 pp=0 {{\n\n{line}\n}}\n")
    (stream,), (source,) = parsed.plan.streams, parsed.streams
    assert stream.body == (Instr(Op.F, 3, None, 0, None, True), Instr(Op.BW, 2, 1, 1))
    spans = [source.span(index) for index in (0, 1)]
    assert [span.line for span in spans] == [7, 7]
    assert [line[span.column - 1 : span.end_column - 1] for span in spans] == [
        "F[0] 3",
        "BW[1] 2@1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "F[0] 3",
        "send_act[1] 3@1 -> dp2",
        "recv_grad 3 <- dp0",
        "reduce_grads[2]",
        "B 1 & W[0] 2",
    ],
)
def test_equal_instructions_are_one_object(text):
    """However they are spelled and wherever they stand: others may compare by identity."""
    spelled = [text, text.replace(" ", "  "), f"{text} # again", text.replace("[", " [ ")]
    body = "".join(f"  {line}\n" for line in spelled)
    streams = "".join(f"stream dp={dp} pp=0 {{\n{body}}}\n" for dp in range(3))
    plan = parse(HEAD + streams + streams.replace(body, f"  {text}\n")).plan
    once = plan.streams[-1].body
    for stream in plan.streams:
        assert all(instr is once[at % len(once)] for at, instr in enumerate(stream.body))
    assert plan.streams[0].body is plan.streams[2].body


def test_programs_name_ranks_chunks_and_tensors():
    """Homes are as in a plan; a rank alone takes the whole tensor."""
    (line,) = read_program_line("  send_act[1] 0@1 -> 6:0/2,7:1/2 128x256xf32")
    assert line.instr == Instr(Op.SEND_ACT, 0, 1, 1)
    assert line.transfers == (Transfer(6, 0, 2), Transfer(7, 1, 2))
    assert line.tensor == TensorType(128, 256, "f32")
    (whole,) = read_program_line("recv_grad 0@1 <- 6 256x256xf32")
    assert whole.transfers == (Transfer(6, 0, 1),)
    first, second = read_program_line("F[0] 0@0 & BW[3] 1@0")
    assert (first.instr.paired, second.instr.paired) == (True, False)


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        (
            "send_act 0@1 -> dp1",
            17,
            "expected a number, but found `dp1`",
            "a program names the rank at the other end",
        ),
        ("send_act 0@1", 13, "expected `->`, but the line ends", None),
        (
            "send_act 0@1 -> 6",
            18,
            "expected a tensor such as `128x256xf32`, `,` or `:` and a chunk, but the line ends",
            None,
        ),
        (
            "send_act 0@1 -> 6:0 8x8xf32",
            21,
            "expected `/` and the number of chunks, but found `8x8xf32`",
            None,
        ),
        (
            "recv_act 0@1 -> 6 8x8xf32",
            14,
            "a receive says where the tensor comes from, with `<-`",
            None,
        ),
        (
            "send_act 0@1 -> 6 99999999999x8xf32",
            19,
            "the number `99999999999` is larger than 1000000000",
            None,
        ),
    ],
)
def test_a_wrong_line_of_a_program_is_answered(line, column, message, hint):
    """As in a plan, with ranks for replicas."""
    with pytest.raises(LineError) as caught:
        read_program_line(line)
    assert (caught.value.column, caught.value.message, caught.value.hint) == (column, message, hint)
