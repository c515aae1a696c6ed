"""torch's CSV is read whole and strictly: what it says, and what exactly is wrong with it."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import PlanSyntaxError, UserError
from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.model import Instr, LayerRange, Level, ModelShape, Op
from resihp.ir.reader import MAX_ERRORS, MAX_TEXT
from resihp.ir.torch_cells import VOCABULARY_HINT, explain_words, name_cells
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.torch_rows import MAX_CELLS, MAX_ROWS


def faults(text, **options):
    """The diagnostics of a file that cannot be read."""
    with pytest.raises(PlanSyntaxError) as caught:
        read_torch_csv(text, **options)
    return caught.value.diagnostics


def fault(text, **options):
    """Its only one."""
    (found,) = faults(text, **options)
    return found


def covered(text, span):
    """What the caret is under."""
    return text.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


def body(text, row=0, **options):
    """The instructions of one row."""
    return read_torch_csv(text, **options).plan.streams[row].body


def test_a_compute_file_is_a_schedule_in_our_words():
    """I is our B, B our BW; idle slots go, and nothing is added."""
    plan = read_torch_csv(",0F0,,0F1,0B1,0I0,0W0,\n").plan
    assert plan.level is Level.SCHEDULE
    assert plan.streams[0].body == (
        Instr(Op.F, 0),
        Instr(Op.F, 1),
        Instr(Op.BW, 1),
        Instr(Op.B, 0),
        Instr(Op.W, 0),
    )


def test_a_file_with_communication_is_a_plan_that_ends_with_a_step():
    """Every kind of action has its instruction; transfers and parameters name their stage."""
    text = (
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,2F0,2B0,2SEND_B0,0RECV_B0,0B0,0REDUCE_GRAD,"
        "0RESHARD,2REDUCE_GRAD,2RESHARD\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,1REDUCE_GRAD"
    )
    plan = read_torch_csv(text).plan
    assert plan.level is Level.PLAN
    assert plan.streams[0].body == (
        Instr(Op.GATHER_PARAMS, stage=0),
        Instr(Op.GATHER_PARAMS, stage=2),
        Instr(Op.F, 0, stage=0),
        Instr(Op.SEND_ACT, 0, stage=0),
        Instr(Op.RECV_ACT, 0, stage=2),
        Instr(Op.F, 0, stage=2),
        Instr(Op.BW, 0, stage=2),
        Instr(Op.SEND_GRAD, 0, stage=2),
        Instr(Op.RECV_GRAD, 0, stage=0),
        Instr(Op.BW, 0, stage=0),
        Instr(Op.REDUCE_GRADS, stage=0),
        Instr(Op.FREE_PARAMS, stage=0),
        Instr(Op.REDUCE_GRADS, stage=2),
        Instr(Op.FREE_PARAMS, stage=2),
        Instr(Op.STEP),
    )
    assert plan.streams[1].body[0] == Instr(Op.RECV_ACT, 0)
    assert plan.streams[1].body[-1] == Instr(Op.STEP)


def test_overlapped_actions_are_a_pair():
    """The first of the two is marked."""
    assert body("0F0,(0F1;1B0)OVERLAP_F_B,1B1,1F1,1F0,0B0,0B1")[1:3] == (
        Instr(Op.F, 1, stage=0, paired=True),
        Instr(Op.BW, 0, stage=1),
    )


def test_rows_are_ranks_and_stages_hold_a_layer_each():
    """The bottom of a V is two stages of neighbouring layers, in one group."""
    plan = read_torch_csv("0F0,3F0\n1F0,2F0\n").plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp) == (1, 2, 1)
    assert [(group.pp, group.ranks) for group in plan.groups] == [(0, (0,)), (1, (1,))]
    assert [group.layers for group in plan.groups] == [
        (LayerRange(0, 0), LayerRange(3, 3)),
        (LayerRange(1, 1), LayerRange(2, 2)),
    ]
    assert (plan.model.layers, plan.model.hidden, plan.batch.tokens) == (4, 1, 1)


def test_a_model_that_is_given_is_spread_over_the_stages():
    """Evenly, earlier stages first; every stage holds a layer."""
    model = ModelShape(name="m", layers=8, hidden=8, heads=2, kv_heads=1, ffn=8, vocab=8)
    plan = read_torch_csv("0F0\n1F0\n2F0\n", model=model, tokens=16).plan
    assert [str(group.layers[0]) for group in plan.groups] == ["0..2", "3..5", "6..7"]
    assert (plan.model, plan.batch.tokens) == (model, 16)
    with pytest.raises(UserError, match="8 layers cannot be spread over the 9 stages"):
        read_torch_csv("\n".join(f"{stage}F0" for stage in range(9)), model=model)


def test_there_are_as_many_micro_batches_as_the_busiest_stage_runs_forward():
    """So that a number out of range stands out; the caller may know better."""
    assert read_torch_csv("0F0,0F7\n1F0,1F1,1F2\n").plan.batch.microbatches == 3
    assert read_torch_csv("0B0\n").plan.batch.microbatches == 1
    assert read_torch_csv("0F0\n", num_microbatches=4).plan.batch.microbatches == 4


def test_places_are_those_of_the_cells():
    """Parts of a pair have their own; the step stands after the end of its row."""
    text = "0UNSHARD, 0F0 ,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,0RESHARD\r\n"
    parsed = read_torch_csv(text)
    (source,) = parsed.streams
    places = [source.span(index) for index in range(len(parsed.plan.streams[0].body))]
    assert [covered(parsed.text, span) for span in places] == [
        *("0UNSHARD", "0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD", "0RESHARD"),
        "",
    ]
    assert places[-1] == Span(1, len(text) - 1, len(text))
    assert covered(parsed.text, parsed.groups[0]) == text.strip()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [True, False])
def test_line_ends_do_not_matter(newline, end):
    """torch writes CRLF, people LF; the last line may end or not."""
    text = newline.join(["0F0,0B0", "1F0,1B0"]) + newline * end
    assert read_torch_csv(text).plan == read_torch_csv("0F0,0B0\n1F0,1B0\n").plan


WRONG_CELLS = [
    ("2F0xyz", "xyz", "text after the action `2F0`: `xyz`"),
    ("2F0 2F1", " 2F1", "text after the action `2F0`"),
    ("2F0F1", "F1", "text after the action `2F0`"),
    ("2F0\x1b[31m", "\x1b[31m", r"text after the action `2F0`: `\x1b[31m`"),
    ("2Q0", "Q", "`Q` is no kind of action"),
    ("2f0", "f", "`f` is no kind of action"),
    ("2F", "2F", "`F` needs a micro-batch"),
    ("2UNSHARD3", "3", "`UNSHARD` is of a whole stage"),
    ("2REDUCE_GRAD0", "0", "`REDUCE_GRAD` is of a whole stage"),
    ("-1F0", "-", "stages are numbered from 0"),
    ("1F-1", "-", "micro-batches are numbered from 0"),
    ("1234567890F0", "1234567890", "at most 9 digits"),
    ("1F1234567890", "1234567890", "at most 9 digits"),
    ("F0", "F", "an action starts with its stage"),
    ("12", ",", "the kind of action is missing"),
    ("1F٣", "٣", "text after the action `1F`"),
    ('"1F0"', '"', "an action starts with its stage"),
    ("1OVERLAP_F_B0", "OVERLAP_F_B", "OVERLAP_F_B stands around two actions"),
    ("()OVERLAP_F_B", "()", "two actions are overlapped, here is none"),
    ("(1F0)OVERLAP_F_B", "(1F0)", "two actions are overlapped, here is one action"),
    ("(1F0;1B1;1B2)OVERLAP_F_B", "(1F0;1B1;1B2)", "here are 3 actions"),
    ("((1F0;1B1)OVERLAP_F_B;1B2)OVERLAP_F_B", "(", "overlapped actions cannot be nested"),
    ("(1F0;1SEND_F1)OVERLAP_F_B", "1SEND_F1", "`1SEND_F1` cannot be overlapped"),
    ("(1F0; )OVERLAP_F_B", " ", "an action is missing here"),
    ("(1F0;1B1)F", "F", "is followed by OVERLAP_F_B, not by `F`"),
    ("(1F0;1B1)OVERLAP_F_B3", "3", "text after `OVERLAP_F_B`: `3`"),
    ("(1F0;1B1", "(", "the `(` is never closed"),
    ("1F0;1F1", ";", "`;` stands inside an action"),
    ("1F0)", ")", "`)` stands inside an action"),
]


@pytest.mark.parametrize(("cell", "under", "message"), WRONG_CELLS)
def test_a_wrong_cell_says_what_is_wrong_with_it(cell, under, message):
    """Each kind of fault in its own words, with the caret under it, and the row and cell."""
    text = f"0F0,0B0\n1F0,{cell},1B0\n"
    found = fault(text)
    assert found.code == "RHP010"
    assert message in found.message
    assert "(row 1, cell 1: `" in found.message
    assert covered(text, found.span) == under
    assert found.message.isprintable()


def test_a_misspelled_kind_is_answered_with_a_near_one():
    """In the hint."""
    assert fault("0SENDF1").hint == "did you mean `SEND_F`?"


def test_all_wrong_cells_are_reported_up_to_a_bound():
    """In the order of the text."""
    found = faults("0F0,0X0\n0Y0,0F0,Z\n")
    assert [(place.span.line, place.span.column) for place in found] == [(1, 6), (2, 2), (2, 9)]
    assert len(faults("x," * 1000)) == MAX_ERRORS


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file is empty"),
        ("\n", 1, "the file is empty"),
        ("0F0\n\n1F0\n", 2, "the row is blank"),
        ("0F0\n1F0\n\n", 3, "the row is blank"),
        ("0F0\n,,\n", 2, "the row has only idle slots"),
    ],
)
def test_a_row_without_actions_is_a_rank_without_work(text, line, message):
    """torch counts blank lines as ranks."""
    found = fault(text)
    assert (found.code, found.span.line) == ("RHP012", line)
    assert found.message.startswith(message)
    assert found.message.endswith(f"(row {line - 1})")


@pytest.mark.parametrize("text", ["0F0,0BW0", "0F0,0B0,0W0"])
def test_the_vocabulary_of_2024_is_recognised_and_refused(text):
    """By its BW, or by its B and W of one micro-batch; the hint says how it is read."""
    found = fault(text)
    assert found.code == "RHP011"
    assert "this file uses the 2024 vocabulary" in found.message
    assert found.hint is not None
    assert "--vocabulary 2024" in found.hint


def test_the_vocabulary_of_2024_is_read_when_asked_for():
    """B is the gradient of the input, BW the whole backward."""
    assert body("0F0,0F1,0BW0,0B1,0W1", vocabulary="2024") == (
        *(Instr(Op.F, number) for number in (0, 1)),
        *(Instr(Op.BW, 0), Instr(Op.B, 1), Instr(Op.W, 1)),
    )


def test_a_file_of_today_is_not_read_as_one_of_2024():
    """I is a word of today."""
    found = fault("0F0,0I0,0W0", vocabulary="2024")
    assert (found.code, found.span) == ("RHP011", Span(1, 5, 8))


def test_words_of_both_vocabularies_are_refused():
    """Nobody can know what B means there."""
    found = fault("0F0,0I0,0W0,0F1,0BW1")
    assert (found.code, found.span) == ("RHP011", Span(1, 17, 21))


def test_weights_alone_are_no_sign_of_2024():
    """W goes with I today, and B stands for other micro-batches."""
    assert [instr.op for instr in body("0F0,0F1,0I0,0B1,0W0")][2:] == [Op.B, Op.BW, Op.W]
    assert body("0F0,0F1,0B0,0W1")[-1] == Instr(Op.W, 1)


def test_communication_in_a_compute_file_is_refused():
    """When the caller says that the file is one; each such cell."""
    found = faults("0UNSHARD,0F0,0B0,0RESHARD", kind="compute")
    assert [place.code for place in found] == ["RHP012", "RHP012"]
    assert "`0UNSHARD` in a compute file" in found[0].message


def test_idle_slots_in_a_file_with_communication_are_refused():
    """torch refuses them too; once per row."""
    (found,) = faults("0F0,,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert (found.code, found.span) == ("RHP012", Span(1, 5, 6))
    assert "(and 1 more in this row)" in found.message


def test_a_file_without_communication_may_be_read_as_a_plan():
    """When the caller says so: the verifier then misses the transfers."""
    plan = read_torch_csv("0F0,0B0\n1F0,1B0\n", kind="comms").plan
    assert (plan.level, plan.streams[0].body[-1].op) == (Level.PLAN, Op.STEP)


def test_one_rank_that_reduces_is_a_plan():
    """It has nobody to communicate with."""
    assert read_torch_csv("0F0,0B0,0REDUCE_GRAD\n").plan.level is Level.PLAN


def test_a_reduction_in_a_compute_file_is_dropped_where_it_says_nothing():
    """torch writes one at the end of its GPipe and 1F1B; elsewhere it would be wrong."""
    text = "0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n"
    assert [instr.op for instr in body(text)] == [Op.F, Op.BW]
    early = fault("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n1F0,1F1,1B0,1B1\n")
    assert (early.code, "stands before `0B1` of its stage" in early.message) == ("RHP012", True)
    twice = fault("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n1F0,1B0\n")
    assert "`0REDUCE_GRAD` stands twice in the row" in twice.message
    idle = fault("0F0,0REDUCE_GRAD\n1F0,1B0\n")
    assert "stands before any work of its stage" in idle.message


def test_a_stage_stands_in_one_row():
    """Both places are shown."""
    found = fault("0F0,1F0\n1F1,1F2\n")
    assert (found.code, found.span) == ("RHP013", Span(2, 1, 4))
    assert found.message == "stage 1 is run by rank 0, and here by rank 1 (row 1, cell 0: `1F1`)"
    assert [place.span for place in found.related] == [Span(1, 5, 8)]
    assert found.related[0].message.endswith("(row 0, cell 1: `1F0`)")


def test_stages_have_no_gap():
    """However large the number is."""
    found = fault("0F0,3F0\n1F0,999999999F0\n")
    assert found.code == "RHP013"
    assert "there is a stage 999999999, but no row runs stage 2" in found.message


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("cells", "," * MAX_CELLS),
        ("rows", "0F0\n" * MAX_ROWS),
        ("characters", "0" * (MAX_TEXT + 1)),
    ],
)
def test_files_are_bounded_before_they_are_cut_up(what, text):
    """Characters, rows and cells, each by its number."""
    found = fault(text)
    assert found.code == "RHP006"
    assert re.match(rf"the file has \d+ {what}; at most \d+ are read", found.message)


@given(st.text(alphabet="012FIBWSEND_RCVUHOLAP(); ,\n\r\t-+x", max_size=60))
def test_any_text_is_read_or_refused_in_words(text):
    """Never a traceback; every place lies in the text."""
    try:
        read_torch_csv(text)
    except PlanSyntaxError as error:
        lines = text.replace("\r\n", "\n").split("\n")
        for found in error.diagnostics:
            assert 1 <= found.span.line <= len(lines)
            assert 1 <= found.span.column <= len(lines[found.span.line - 1]) + 1
            assert found.message.isprintable()


def test_findings_say_whose_words_they_use():
    """The first one that speaks of a backward, once, after its own hint."""
    about = Diagnostic(code="RHP303", message="`F 0` has no backward", span=Span(1, 1, 4))
    speaks = msgspec.structs.replace(about, message="`BW 0` stands before `F 0`", hint="so")
    found = explain_words([about, speaks, speaks])
    assert [one.hint for one in found] == [None, f"so; {VOCABULARY_HINT}", "so"]
    assert explain_words([]) == []


def test_findings_are_told_in_cells():
    """A place inside a cell, a whole row, the end of one; notes too."""
    text = "0F0,0F1 \n,(1F0;1B1)OVERLAP_F_B\n"
    places = [Span(1, 5, 8), Span(2, 9, 12), Span(2, 1, 24), Span(1, 9, 10)]
    names = [
        "row 0, cell 1: `0F1`",
        "row 1, cell 1: `(1F0;1B1)OVERLAP_F_B`",
        "row 1",
        "end of row 0",
    ]
    for place, name in zip(places, names, strict=True):
        finding = Diagnostic(
            code="RHP000", message="so", span=place, related=(Related("and so", place),)
        )
        (named,) = name_cells([finding], text)
        assert named.message == f"so ({name})"
        assert named.related[0].message == f"and so ({name})"
        assert named.span == place
