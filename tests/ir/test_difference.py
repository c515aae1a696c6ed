"""`resihp diff`: what changed in meaning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from plan_build import make_plan
from strategies import plans

from resihp.cli import main
from resihp.compiler.facts import facts_of, move_bytes
from resihp.ir.difference import GroupChange, GroupState, Position, compare
from resihp.ir.explanation import example_of
from resihp.ir.measures import measure, state_moves
from resihp.ir.model import GroupName
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan

WHOLE = print_plan(make_plan(dp=2, tp=2))
SHRUNK = print_plan(make_plan(dp=2, tp=2, degrees={GroupName(1, 0): 1}))
DROPPED = print_plan(make_plan(dp=2, tp=2, gone={1: 0}))


def changes(old, new):
    """The difference of two texts."""
    return compare(parse(old), parse(new))


def line_of(text, line):
    """Number of the first line that reads like this."""
    return text.split("\n").index(line) + 1


def edit(text, *edits):
    """`text` with the first occurrence of each replaced."""
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    return text


def test_spelling_makes_no_difference():
    """Comments, shared streams, homes that are said and order of lines mean nothing."""
    plan = make_plan(dp=2, tp=2, share=True)
    shared = print_plan(plan).replace("mesh", "# a comment\nmesh", 1)
    assert changes(WHOLE, shared).is_empty
    single = print_plan(make_plan())
    assert changes(single, single.replace("  F 0\n", "  F 0@0\n")).is_empty


@given(plans)
def test_a_plan_does_not_differ_from_itself(plan):
    """Whatever it says, right or wrong."""
    parsed = parse(print_plan(plan))
    assert compare(parsed, parsed).is_empty


@given(plans, plans)
def test_the_other_way_round_the_same_things_differ(old, new):
    """With before and after exchanged."""
    there, back = (
        compare(parse(print_plan(one)), parse(print_plan(other)))
        for one, other in ((old, new), (new, old))
    )
    assert {(c.field, c.after, c.before) for c in there.fields} == {
        (c.field, c.before, c.after) for c in back.fields
    }
    assert {(c.group, c.after, c.before) for c in there.groups} == {
        (c.group, c.before, c.after) for c in back.groups
    }
    assert {(m.ranks, m.after, m.before) for m in there.ranks} == {
        (m.ranks, m.before, m.after) for m in back.ranks
    }
    assert {(c.pp, c.replicas, c.after, c.num_added) for c in there.order} == {
        (c.pp, c.replicas, c.before, c.num_removed) for c in back.order
    }


def test_lines_about_the_job_are_compared_value_by_value():
    """What was not given before or is not now is said."""
    new = edit(WHOLE, ("tokens=16", "tokens=32\nmemory 2GiB\norder 1f1b"))
    found = [(c.field, c.before, c.after) for c in changes(WHOLE, new).fields]
    assert found == [
        ("batch tokens", "16", "32"),
        ("order", None, "1f1b"),
        ("memory", None, "2GiB"),
    ]


def test_what_is_kept_of_an_iteration_is_compared():
    """Also where the streams do not say it."""
    before, after = (
        edit(WHOLE, ("tokens=16", f"tokens=16\nresume step=3 keep={keep}"))
        for keep in ("none", "0,1@1")
    )
    found = [(c.field, c.before, c.after) for c in changes(before, after).fields]
    assert found == [("resume keep", None, "0,1@1")]


def test_a_group_that_shrank_and_the_rank_that_left():
    """TP degree and ranks; transfers to it are cut now."""
    found = changes(WHOLE, SHRUNK)
    before = GroupState(tp=2, ranks=(4, 5), layers="0..3")
    after = GroupState(tp=1, ranks=(4,), layers="0..3")
    assert found.groups == (GroupChange(group="dp1.pp0", before=before, after=after),)
    (move,) = found.ranks
    assert (move.ranks, move.before, move.after) == ((5,), "dp1.pp0", "standby")
    cuts = [(c.sender, c.receiver, c.what, c.num_transfers) for c in found.transfers]
    assert cuts == [
        ("dp1.pp0", "dp1.pp1", "activation", 4),
        ("dp1.pp1", "dp1.pp0", "gradient", 4),
    ]
    assert all(cut.scattered for cut in found.transfers)
    assert found.order == ()
    assert not any(cut.scattered for cut in changes(SHRUNK, WHOLE).transfers)


def test_a_dropped_replica_and_who_runs_its_micro_batches():
    """Groups that are gone, ranks that are lost, micro-batches that moved."""
    found = changes(WHOLE, DROPPED)
    assert [(c.group, c.after) for c in found.groups] == [("dp1.pp0", None), ("dp1.pp1", None)]
    assert {(m.ranks, m.after) for m in found.ranks} == {((4, 5), "lost"), ((6, 7), "lost")}
    (moved,) = found.micro_batches
    assert (moved.home, moved.microbatches, moved.stages) == (1, (0, 1, 2, 3), (0, 1))
    assert (moved.before, moved.after) == (1, 0)
    assert {(c.pp, c.replicas, c.num_removed) for c in found.order} == {
        (0, (0,), 0),
        (1, (0,), 0),
    }


def test_a_micro_batch_that_nobody_runs_any_more():
    """Plans need not be right to be compared."""
    new = edit(WHOLE, ("  F 3\n", ""))
    (moved,) = changes(WHOLE, new).micro_batches
    assert (moved.microbatches, moved.stages, moved.before, moved.after) == ((3,), (0,), 0, None)


def test_the_first_instruction_that_differs_is_named_with_both_places():
    """Another order of the same instructions, in both replicas that share the stream."""
    old = print_plan(make_plan(dp=2, share=True, order="gpipe"))
    new = edit(
        old, ("  recv_grad 0\n  BW 0\n  recv_grad 1\n", "  recv_grad 1\n  recv_grad 0\n  BW 0\n")
    )
    (change,) = changes(old, new).order
    assert (change.pp, change.replicas) == (0, (0, 1))
    assert (change.num_removed, change.num_added) == (0, 0)
    line = line_of(old, "  recv_grad 0")
    assert change.before == Position(instr="recv_grad 0", index=8, line=line)
    assert change.after == Position(instr="recv_grad 1", index=8, line=line)


def test_a_stream_that_goes_on_parts_at_the_end():
    """An instruction more, and none before it."""
    old = example_of("RHP702").bad
    (change,) = changes(old, example_of("RHP702").good).order
    assert (change.before, change.num_added) == (None, 1)
    assert change.after == Position(instr="step", index=4, line=13)


def test_a_scatter_hides_no_change_of_order():
    """It is left out of the comparison; what else changed is not."""
    new = edit(SHRUNK, ("stream dp=1 pp=0 {\n  F 0\n", "stream dp=1 pp=0 {\n"))
    (change,) = changes(WHOLE, new).order
    assert (change.pp, change.replicas, change.num_removed) == (0, (1,), 1)
    assert change.before == Position(
        instr="F 0", index=0, line=line_of(WHOLE, "stream dp=1 pp=0 {") + 1
    )


def test_another_source_of_state_is_a_change():
    """Even if nothing else is."""
    example = example_of("RHP804")
    found = changes(example.good, example.bad)
    assert [(change.added, change.line) for change in found.sources] == [
        (False, "reshard layers=0..1 dp0.pp0 -> dp1.pp0"),
        (True, "reshard layers=0..1 dp1.pp0 -> dp1.pp0"),
    ]


LOOPED = """plan 1
model tiny layers=8 hidden=64 heads=8 kv_heads=4 ffn=96 vocab=128
mesh tp=1 pp=2 dp=2
batch microbatches=1 tokens=16

group dp0.pp0 ranks=0 layers=0..1,4..5
group dp0.pp1 ranks=1 layers=2..3,6..7
group dp1.pp0 ranks=2 layers=0..1,4..5
group dp1.pp1 ranks=3 layers=2..3,6..7

stream dp=0,1 pp=0 {
  F[0] 0
  send_act[0] 0
  recv_act[2] 0
  F[2] 0
  send_act[2] 0
  recv_grad[2] 0
  BW[2] 0
  send_grad[2] 0
  recv_grad[0] 0
  BW[0] 0
  reduce_grads[0]
  reduce_grads[2]
  step
}

stream dp=0,1 pp=1 {
  recv_act[1] 0
  F[1] 0
  send_act[1] 0
  recv_act[3] 0
  F[3] 0
  BW[3] 0
  send_grad[3] 0
  recv_grad[1] 0
  BW[1] 0
  send_grad[1] 0
  reduce_grads[1]
  reduce_grads[3]
  step
}
"""
"""Two stages per group, one micro-batch per replica."""


def own_streams(text):
    """The text with a stream of its own for each replica."""
    head, *streams = text.split("\nstream dp=0,1 ")
    return head + "".join(
        f"\nstream dp={replica} {stream}\n" for stream in streams for replica in (0, 1)
    )


def parting(change):
    """The instructions at which two streams part."""
    return change.before.instr, change.after.instr


def test_one_stage_of_a_micro_batch_that_moved():
    """Which stage, and what its neighbours now say: the other end of their transfers."""
    text = own_streams(LOOPED)
    parts = text.split("\nstream ")
    parts[3] = edit(
        parts[3],
        ("  F[3] 0\n  BW[3] 0\n", "  F[3] 0\n  recv_act[3] 0@1 <- dp1\n  F[3] 0@1\n  BW[3] 0\n"),
        ("  recv_grad[1] 0\n", "  BW[3] 0@1\n  send_grad[3] 0@1 -> dp1\n  recv_grad[1] 0\n"),
    )
    parts[4] = edit(parts[4], ("  recv_act[3] 0\n  F[3] 0\n  BW[3] 0\n  send_grad[3] 0\n", ""))
    parts[2] = edit(
        parts[2],
        ("  send_act[2] 0\n", "  send_act[2] 0 -> dp0\n"),
        ("  recv_grad[2] 0\n", "  recv_grad[2] 0 <- dp0\n"),
    )
    found = changes(text, "\nstream ".join(parts))
    (moved,) = found.micro_batches
    assert (moved.home, moved.microbatches, moved.stages) == (1, (0,), (3,))
    assert (moved.before, moved.after) == (1, 0)
    of_sender = next(c for c in found.order if (c.pp, c.replicas) == (0, (1,)))
    assert (of_sender.num_removed, of_sender.num_added) == (2, 2)
    assert parting(of_sender) == ("send_act[2] 0", "send_act[2] 0 -> dp0")
    assert {(c.pp, c.replicas): c.num_added - c.num_removed for c in found.order} == {
        (0, (1,)): 0,
        (1, (0,)): 4,
        (1, (1,)): -4,
    }


def test_other_ends_and_stages_that_are_said_make_no_difference():
    """The default of each, written out."""
    text = own_streams(LOOPED)
    said = edit(text, ("send_act[0] 0\n", "send_act[0] 0@0 -> dp0\n"))
    assert changes(LOOPED, said).is_empty
    single = print_plan(make_plan())
    assert changes(single, edit(single, ("  F 0\n", "  F[0] 0\n"))).is_empty


def test_another_stage_of_the_same_group_is_a_change_of_order():
    """The same operations of the same micro-batch."""
    new = edit(
        LOOPED, ("  reduce_grads[0]\n  reduce_grads[2]\n", "  reduce_grads[2]\n  reduce_grads[0]\n")
    )
    (change,) = changes(LOOPED, new).order
    assert (change.pp, change.replicas) == (0, (0, 1))
    assert parting(change) == ("reduce_grads[0]", "reduce_grads[2]")
    assert (change.num_removed, change.num_added) == (0, 0)


def test_instructions_that_overlap_now():
    """The pair is shown as it is written."""
    text = print_plan(make_plan(pp=1, microbatches=2))
    old = edit(text, ("  BW 0\n  F 1\n", "  F 1\n  BW 0\n"))
    new = edit(text, ("  BW 0\n  F 1\n", "  F 1 & BW 0\n"))
    (change,) = changes(old, new).order
    assert parting(change) == ("F 1", "F 1 & BW 0")


def test_layers_that_moved_are_a_change_of_every_group():
    """Ranges stage by stage; streams stay what they are."""
    new = LOOPED.replace("layers=0..1,4..5", "layers=0..2,4..5").replace("=2..3,6", "=3..3,6")
    found = changes(LOOPED, new)
    assert [(c.group, c.after and c.after.layers) for c in found.groups] == [
        ("dp0.pp0", "0..2,4..5"),
        ("dp0.pp1", "3..3,6..7"),
        ("dp1.pp0", "0..2,4..5"),
        ("dp1.pp1", "3..3,6..7"),
    ]
    assert (found.order, found.micro_batches) == ((), ())


def test_level_order_and_transport_are_lines_about_the_job():
    """A schedule and the plan made of it differ in level; what was added is counted."""
    schedule = "".join(
        line
        for line in LOOPED.replace("plan 1", "schedule 1").splitlines(keepends=True)
        if not line.startswith(("  send", "  recv", "  reduce", "  step"))
    )
    found = changes(schedule, edit(LOOPED, ("tokens=16", "tokens=16\ntransport pair")))
    assert [(c.field, c.before, c.after) for c in found.fields] == [
        ("level", "schedule", "plan"),
        ("transport", None, "pair"),
    ]
    assert [(c.num_removed, c.num_added) for c in found.order] == [(0, 9), (0, 9)]


def test_all_kinds_of_sources_are_compared():
    """`reshard`, `move` and `load` lines that came and went."""
    block = "\nreconfigure {{\n{}}}\n\nstream"
    move, load = "  move layers=0..1 3 -> 2\n", "  load layers=2..3 step=30 -> dp1.pp1\n"
    old = edit(LOOPED, ("\nstream", block.format(move)))
    new = edit(LOOPED, ("\nstream", block.format(load)))
    assert [(change.added, change.line) for change in changes(old, new).sources] == [
        (False, move.strip()),
        (True, load.strip()),
    ]


def test_time_and_idle_share_of_gpipe():
    """p stages and m micro-batches: m+p-1 of F and of BW, of which m are busy."""
    plan = make_plan(pp=4, microbatches=8, order="gpipe")
    measures = measure(plan, facts_of(plan))
    assert measures.makespan == (8 + 3) * 3
    assert measures.idle == pytest.approx(3 / 11)
    assert measures.peak is None


def test_the_peak_is_that_of_the_group_that_needs_most():
    """GPipe keeps all activations, 1F1B as many as there are stages to come."""
    gpipe, one_f_one_b = (
        measure(plan, facts_of(plan)).peak
        for plan in (
            make_plan(pp=2, microbatches=8, order=order, memory_bytes=1 << 30)
            for order in ("gpipe", "1f1b")
        )
    )
    assert gpipe is not None
    assert one_f_one_b is not None
    assert gpipe.num_bytes > one_f_one_b.num_bytes
    assert gpipe.capacity_bytes == 1 << 30


def moves_of(code):
    """(source, target, bytes) of everything that moves in the good example of a code."""
    example = example_of(code)
    assert example.previous is not None
    old, new = parse(example.previous).plan, parse(example.good).plan
    moves = state_moves(old, new, lambda move: move_bytes(new.model, move))
    return [(move.source, move.target, move.num_bytes) for move in moves]


HIDDEN, VOCAB = 32, 272
CUT = 2 * HIDDEN * (4 + 2) * 8 + 3 * HIDDEN * 64
"""Elements of the projections of one layer of the examples."""


def test_state_is_counted_per_pair_of_ranks():
    """The member that goes on alone gets the other half of layers and tables from its twin."""
    halves = 2 * (CUT // 2) + 2 * (VOCAB // 2) * HIDDEN
    assert moves_of("RHP801") == [(1, 2, halves * 3 * 4)]


def test_a_new_member_gets_norms_and_head_too():
    """Everything that goes with the last layer, parameters and both moments."""
    whole = CUT + 2 * HIDDEN + VOCAB * HIDDEN + HIDDEN
    assert moves_of("RHP803") == [(3, 2, whole * 3 * 4)]


@pytest.fixture
def files(tmp_path):
    """Two plans of which the second follows the first."""
    example = example_of("RHP801")
    old, new = tmp_path / "old.plan", tmp_path / "new.plan"
    assert example.previous is not None
    old.write_text(example.previous.replace("tokens=16", "tokens=16\nmemory 1GiB"))
    new.write_text(example.good.replace("tokens=16", "tokens=16\nmemory 1GiB"))
    return old, new


def test_diff_prints_a_page(capsys, files):
    """A section per kind of change; those without changes are left out."""
    old, new = map(str, files)
    assert main(["diff", old, new]) == 1
    page = capsys.readouterr().out
    assert page.startswith(f"{old} -> {new}\n\ngroups\n  dp1.pp0: TP 2 -> 1, ranks 2,3 -> 2\n")
    assert "\nranks\n  rank 3: dp1.pp0 -> lost\n" in page
    assert "\nreconfigure\n  + reshard layers=0..1 dp0.pp0 -> dp1.pp0\n" in page
    assert "\n  rank 1 -> rank 2: 210 KiB\n" in page
    assert "\ntime\n  3 -> 3 units (+0.0%)" in page
    assert "\nmemory\n  peak " in page
    assert "\norder\n" not in page


def test_diff_of_the_same_meaning_is_0(capsys, files):
    """And one line."""
    old = str(files[0])
    assert main(["diff", old, old]) == 0
    assert capsys.readouterr().out == f"{old} -> {old}: the same meaning\n"


def test_diff_writes_json(capsys, files):
    """Everything, with the measures of both."""
    assert main(["diff", "--format", "json", *map(str, files)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["state_moves"] == [{"source": 1, "target": 2, "num_bytes": 215040}]
    assert document["measures_before"]["makespan"] == 3.0
    assert document["measures_after"]["peak"]["group"] == "dp1.pp0"
    assert document["changes"]["groups"][0]["after"] == {
        "tp": 1,
        "ranks": [2],
        "layers": "0..1",
    }


def test_diff_of_a_faulty_plan_says_what_is_left_out(capsys, files):
    """Changes are shown, costs are not."""
    old, new = files
    new.write_text(new.read_text().replace("  BW 0\n", ""))
    assert main(["diff", str(old), str(new)]) == 1
    page = capsys.readouterr().out
    assert "time, memory and state are left out" in page
    assert "\norder\n  dp0,1.pp0: `BW 0` (#1, line 12)" in page
    assert "\ntime\n" not in page


def test_diff_of_plans_that_do_not_follow_moves_no_state(capsys, files):
    """The other way round the lost rank would come back."""
    assert main(["diff", *map(str, reversed(files))]) == 1
    page = capsys.readouterr().out
    assert "so no state moves: RHP807" in page
    assert "\ntime\n" in page


def test_diff_of_what_is_no_plan_is_2(capsys, files, tmp_path):
    """1 would say that the plans differ."""
    bad = tmp_path / "bad.plan"
    bad.write_text("plan 1\nnonsense\n")
    assert main(["diff", str(files[0]), str(bad)]) == 2
    assert "bad.plan:2:1: unknown statement `nonsense`" in capsys.readouterr().err
    assert main(["diff", "-", "-"]) == 2


def test_diff_tells_time_under_the_transport_of_each_plan(capsys, tmp_path):
    """The same streams take longer where sends block."""
    text = example_of("RHP904").bad
    (tmp_path / "old.plan").write_text(text.replace("transport eager=0\n", ""))
    (tmp_path / "new.plan").write_text(text)
    assert main(["diff", str(tmp_path / "old.plan"), str(tmp_path / "new.plan")]) == 1
    page = capsys.readouterr().out
    assert "\njob\n  transport: not given -> eager=0\n" in page
    assert "\ntime\n  14 -> 16 units (+14.3%)" in page


def test_diff_of_a_schedule_and_its_plan(capsys, tmp_path):
    """The plan has more instructions and takes as long, in no less memory."""
    head = LOOPED.replace("tokens=16", "tokens=16\nmemory 1GiB")
    schedule = "".join(
        line
        for line in head.replace("plan 1", "schedule 1").splitlines(keepends=True)
        if not line.startswith(("  send", "  recv", "  reduce", "  step"))
    )
    (tmp_path / "old.plan").write_text(schedule)
    (tmp_path / "new.plan").write_text(head)
    files = [str(tmp_path / name) for name in ("old.plan", "new.plan")]
    assert main(["diff", "--format", "json", *files]) == 1
    document = json.loads(capsys.readouterr().out)
    before, after = document["measures_before"], document["measures_after"]
    assert before["makespan"] == after["makespan"] == 12
    assert before["idle"] == after["idle"]
    assert 0 < before["peak"]["num_bytes"] <= after["peak"]["num_bytes"]
