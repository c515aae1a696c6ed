"""Lint: each warning beside a plan that differs in little and gets none."""

from __future__ import annotations

import itertools
import json
import random
import re

import msgspec
import pytest
from plan_build import make_plan
from plan_generator import generate
from random_plans import random_plan
from report_plans import plan_text

from resihp.cli import main
from resihp.compiler import initial_plan
from resihp.compiler.adapt import adapt
from resihp.compiler.cluster import CLUSTERS, Link
from resihp.errors import NoFeasiblePlan
from resihp.ir.codes import CODES
from resihp.ir.diagnostics import Severity
from resihp.ir.explanation import example_of
from resihp.ir.lanes import lanes_of
from resihp.ir.lint import lint
from resihp.ir.model import Batch, GroupName, LayerRange, Level, Mesh, ModelShape, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.timeline import play
from resihp.ir.transport import parse_transport
from resihp.ir.verify import verify

MODEL = ModelShape(name="tiny", layers=8, hidden=64, heads=8, kv_heads=8, ffn=96, vocab=64)
"""The head counts as a tenth of a layer."""


def warnings(plan: Plan | str):
    """What lint says about a plan that the verifier accepts."""
    parsed = parse(plan if isinstance(plan, str) else print_plan(plan))
    assert verify(parsed) == []
    return lint(parsed)


_FREE = Link(gb_per_s=1e9, latency_us=1e-6)
FREE_LINKS = msgspec.structs.replace(CLUSTERS["cpu-box"], intra_node=_FREE, inter_node=_FREE)
"""Lint knows no prices, so the compiler is to see none of transfers either."""


def codes(plan: Plan | str) -> list[str]:
    return [finding.code for finding in warnings(plan)]


def edit(text: str, *edits: tuple[str, str]) -> str:
    """`text` with the first occurrence of each replaced."""
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    return text


def split(plan: Plan, *firsts: int) -> Plan:
    """The plan with stages that start at these layers."""
    ends = [*(first - 1 for first in firsts[1:]), plan.model.layers - 1]
    groups = tuple(
        msgspec.structs.replace(group, layers=(LayerRange(firsts[group.pp], ends[group.pp]),))
        for group in plan.groups
    )
    return msgspec.structs.replace(plan, groups=groups, model=MODEL)


# --- idle ranks


def test_a_standby_rank_that_could_join_a_group():
    """One rank of two; the other is idle, and both ends of the remedy are named."""
    plan = make_plan(tp=2, dp=2, degrees={GroupName(1, 0): 1})
    found = [finding for finding in warnings(plan) if finding.code == "RHP901"]
    assert [finding.message for finding in found] == [
        "rank 5 is healthy and idle, but could raise the TP degree of dp1.pp0 (TP 1 -> 2)"
    ]
    (related,) = found[0].related
    assert related.message == "dp1.pp0 has 1 of the mesh's tp=2 ranks"


def test_a_standby_rank_that_no_group_can_use():
    """Three of four ranks are left: 2 is the power of two, and one more makes none."""
    plan = make_plan(tp=4, dp=1, degrees={GroupName(0, 0): 2})
    lost = msgspec.structs.replace(plan, standby=(2,), lost=(3,))
    assert codes(plan) == ["RHP902", "RHP901"]
    assert codes(lost) == ["RHP902"]


def test_standby_ranks_beside_full_groups_are_no_waste():
    """A replica went and its ranks are left over; every group has the mesh's degree."""
    plan = make_plan(dp=2, tp=2, gone={1: 0})
    plan = msgspec.structs.replace(plan, standby=plan.lost, lost=())
    assert codes(plan) == []


def test_a_degree_that_the_model_forbids_is_not_proposed():
    """Four heads cannot be cut in eight."""
    plan = make_plan(tp=8, pp=1, degrees={GroupName(0, 0): 4})
    plan = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, heads=4))
    assert codes(plan) == []


def test_a_group_without_compute():
    """Replica 1 only waits to reduce and step; with one micro-batch it is no longer idle."""
    plan = make_plan(dp=2, pp=1, microbatches=2, gone={1: 0})
    idle = (
        print_plan(msgspec.structs.replace(plan, lost=())).replace(
            "\nstream", "group dp1.pp0 ranks=1 layers=0..7\n\nstream", 1
        )
        + "\nstream dp=1 pp=0 {\n  reduce_grads\n  step\n}\n"
    )
    (finding,) = warnings(idle)
    assert finding.code == "RHP901"
    assert finding.message == "dp1.pp0 computes nothing: its ranks 1 only wait for the others"
    moved = idle.replace("  F 1@1\n  BW 1@1\n", "").replace(
        "stream dp=1 pp=0 {\n", "stream dp=1 pp=0 {\n  F 1\n  BW 1\n"
    )
    assert "RHP901" not in codes(moved)


# --- balance


@pytest.mark.parametrize(
    ("firsts", "expected"),
    [
        ((0, 4), []),
        ((0, 5), ["RHP902"]),
        ((0, 6), ["RHP902"]),
        ((0, 3), ["RHP902"]),
    ],
)
def test_layers_in_uneven_stages(firsts, expected):
    """Four and four are even; five and three are 1.6 times apart, and a layer can move."""
    assert codes(split(make_plan(pp=2), *firsts)) == expected


def test_layers_that_cannot_be_even_are_left_alone():
    """3, 2, 3 of eight layers: no layer can move and make the busiest less busy."""
    assert codes(split(make_plan(pp=3), 0, 3, 5)) == []
    (finding,) = warnings(split(make_plan(pp=3), 0, 4, 6))
    assert "give layer 3 to stage 1 in every replica" in (finding.hint or "")


def test_the_head_counts_as_layers():
    """With a vocabulary worth two layers, five and three is the even split."""
    plan = split(make_plan(pp=2), 0, 5)
    layer = 2 * 64 * 64 * 2 + 3 * 64 * 96
    vocab = 2 * layer // 64
    wide = msgspec.structs.replace(plan, model=msgspec.structs.replace(MODEL, vocab=vocab))
    assert codes(wide) == []
    even = split(make_plan(pp=2), 0, 4)
    assert codes(msgspec.structs.replace(even, model=wide.model)) == ["RHP902"]


def test_a_group_that_shrank_and_kept_its_micro_batches():
    """Twice the time of the others; the hint names who could take one."""
    plan = make_plan(tp=2, dp=2, pp=1, degrees={GroupName(1, 0): 1})
    plan = msgspec.structs.replace(plan, standby=(), lost=plan.standby)
    (finding,) = warnings(plan)
    assert finding.code == "RHP902"
    assert "dp1.pp0 computes" in finding.message
    assert "2 times the mean of the other groups" in finding.message
    assert "let replica 0 run one of its micro-batches" in (finding.hint or "")


def test_micro_batches_that_moved_as_far_as_they_help():
    """Six micro-batches at TP 2 and three at TP 1 take the same; one more would not help."""
    plan = make_plan(tp=2, dp=2, pp=1, microbatches=5, degrees={GroupName(1, 0): 1})
    text = print_plan(msgspec.structs.replace(plan, standby=(), lost=plan.standby))
    head, here, there = text.split("\nstream ")
    for number, expected in ((4, ["RHP902"]), (3, [])):
        lines = f"  F {number}\n  BW {number}\n"
        assert lines in there
        there = there.replace(lines, "")
        here = edit(here, ("  reduce_grads", f"  F {number}@1\n  BW {number}@1\n  reduce_grads"))
        assert codes("\nstream ".join([head, here, there])) == expected


def test_positions_that_are_alike_are_one_finding():
    """A slow stage of four replicas is said once."""
    (finding,) = warnings(split(make_plan(pp=2, dp=4, share=True), 0, 6))
    assert finding.message.startswith("dp0..3.pp0 each compute ")


def test_one_group_has_no_peers():
    """Nothing to compare with."""
    assert codes(make_plan(pp=1)) == []


# --- receives


def early(num_ahead: int, microbatches: int = 6) -> str:
    """Two stages, 1F1B; stage 1 posts each activation `num_ahead` micro-batches ahead."""
    text = print_plan(make_plan(pp=2, microbatches=microbatches))
    head, tail = text.split("stream dp=0 pp=1 {\n")
    receives = [f"  recv_act {number}\n" for number in range(microbatches)]
    for receive in receives:
        assert receive in tail
        tail = tail.replace(receive, "")
    for number in range(microbatches - num_ahead):
        tail = edit(tail, (f"  F {number}\n", f"{receives[number + num_ahead]}  F {number}\n"))
    return head + "stream dp=0 pp=1 {\n" + "".join(receives[:num_ahead]) + tail


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 3, 4])
def test_a_receive_may_stand_two_micro_batches_ahead(num_ahead):
    """F and BW of two micro-batches, four computes; from three micro-batches on it is said."""
    found = warnings(early(num_ahead))
    assert [finding.code for finding in found] == ["RHP903"] * (num_ahead > 2)
    if found:
        (finding,) = found
        assert f"holds a buffer {2 * num_ahead} computes longer than it has to" in finding.message
        assert "(3 receives of this stream are early)" in finding.message


def test_a_receive_that_the_channel_puts_early_is_no_waste():
    """The tensor behind it is used at once, and a channel keeps its order."""
    text = print_plan(make_plan(pp=2, microbatches=6, order="gpipe"))
    late_first = ["F 1", "F 2", "F 3", "F 4", "F 5", "F 0"]
    head, tail = text.split("stream dp=0 pp=1 {\n")
    body = "".join(f"  recv_act {number}\n" for number in (0, 1))
    body += "".join(
        ("" if forward == "F 1" or forward == "F 0" else f"  recv_act {forward[2:]}\n")
        + f"  {forward}\n"
        for forward in late_first
    )
    rest = tail[tail.index("  BW 0\n") :]
    assert codes(head + "stream dp=0 pp=1 {\n" + body + rest) == []


def test_receives_of_other_transports_are_left_alone():
    """There the place of a receive is a matter of progress."""
    parsed = parse(early(4))
    assert [finding.code for finding in lint(parsed)] == ["RHP903"]
    assert lint(parsed, transport="pair") == []


def test_a_receive_that_a_blocked_send_waits_for():
    """Nothing may be buffered: gradient 1 is ready while stage 0 still computes, and gradient 2
    comes after it. The claim is checked by doing what the hint says.
    """
    example = example_of("RHP904")
    assert verify(parse(example.bad), transport="eager=0") == []
    (finding,) = lint(parse(example.bad))
    assert finding.message == (
        "`recv_grad 1` is posted late for transport `eager=0`: the iteration takes 16 units of "
        "time, and 14 if not"
    )
    assert finding.hint == (
        "post it before `BW 0` (line 19); that changes the order of nothing that is posted"
    )
    moved = example.bad.replace("  BW 0\n  recv_grad 1\n", "  recv_grad 1\n  BW 0\n", 1)
    assert lint(parse(moved)) == []
    before, after = (makespan(text, "eager=0") for text in (example.bad, moved))
    assert (before, after) == (16, 14)


@pytest.mark.parametrize("transport", ["edge", "eager=2KiB", "eager=1GiB", "pair"])
def test_a_late_receive_matters_only_where_somebody_waits_for_it(transport):
    """With room for one message no send waits."""
    parsed = parse(example_of("RHP904").bad)
    assert verify(parsed, transport=transport) == []
    assert lint(parsed, transport=transport) == []


def test_what_is_said_of_late_receives_is_true():
    """Random plans: the plan after the hint is accepted and as fast as was said."""
    rng, num_found = random.Random(9), 0
    for _ in range(500):
        text = print_plan(random_plan(rng))
        late = [f for f in lint(parse(text), transport="eager=0") if f.code == "RHP904"]
        if len(late) == 1 and " more " not in late[0].message:
            assert verify(parse(text), transport="eager=0") == []
            num_found += 1
            said = [float(n) for n in re.findall(r"(\d+)(?: units| if)", late[0].message)]
            target = int(re.findall(r"line (\d+)", late[0].hint or "")[0])
            lines = text.split("\n")
            lines.insert(target - 1, lines.pop(late[0].span.line - 1))
            moved = "\n".join(lines)
            assert verify(parse(moved), transport="eager=0") == []
            assert [makespan(text, "eager=0"), makespan(moved, "eager=0")] == said
    assert num_found


def makespan(text: str, transport: str) -> float:
    lanes = lanes_of(parse(text).plan)
    sizes = dict.fromkeys(lanes, 4096)
    return play(lanes, transport=parse_transport(transport), boundary_bytes=sizes).makespan


# --- exchanges and cuts


def test_replicas_that_run_each_others_micro_batches():
    """One direction is a migration, both are an exchange."""
    text = print_plan(make_plan(dp=2, pp=1, microbatches=3))
    head, here, there = text.split("\nstream ")
    moved = there.replace("  F 0\n  BW 0\n", ""), here.replace("  F 0", "  F 0@1\n  BW 0@1\n  F 0")
    one_way = "\nstream ".join([head, moved[1], moved[0]])
    assert "RHP905" not in codes(one_way)
    back = (
        moved[1].replace("  F 2\n  BW 2\n", ""),
        moved[0].replace("  F 1", "  F 2@0\n  BW 2@0\n  F 1"),
    )
    (finding,) = warnings("\nstream ".join([head, *back]))
    assert finding.message == (
        "replicas 0 and 1 run each other's micro-batches at stage 0: the migration cancels"
    )
    assert finding.related[0].message == "`F 2@0` of dp1.pp0"


@pytest.mark.parametrize(
    ("tp", "degrees", "expected"),
    [
        (1, {}, ["RHP906", "RHP906"]),
        (2, {}, []),
        (2, {GroupName(0, 0): 1}, []),
        (2, {GroupName(0, 0): 1, GroupName(0, 1): 1}, ["RHP906", "RHP906"]),
    ],
)
def test_a_cut_into_one_chunk(tp, degrees, expected):
    """Between single ranks a cut does nothing; between larger groups it is a choice, or needed."""
    plan = make_plan(tp=tp, degrees=degrees, scatter=True)
    plan = msgspec.structs.replace(plan, standby=(), lost=plan.standby)
    found = [finding for finding in warnings(plan) if finding.code == "RHP906"]
    assert [finding.code for finding in found] == expected
    if found:
        assert found[0].message == (
            "`scatter_act 0` cuts into one chunk (as 3 more in this stream): both groups have one "
            "rank"
        )


# --- several stages per group


def looped(schedule: str, microbatches: int = 4) -> Plan:
    """Two positions, two stages each."""
    batch = Batch(microbatches=microbatches, tokens=16)
    return initial_plan(MODEL, Mesh(tp=1, pp=2, dp=2), batch, schedule=schedule)


def test_loads_are_those_of_all_stages_of_a_group():
    """In a V a heavy last stage weighs on the first position, and stage 2 could take a layer."""
    plan = looped("zbv")
    firsts = (0, 1, 3, 4)
    ranges = [LayerRange(first, last) for first, last in zip(firsts, (0, 2, 3, 7), strict=True)]
    groups = tuple(
        msgspec.structs.replace(group, layers=(ranges[group.pp], ranges[3 - group.pp]))
        for group in plan.groups
    )
    (finding,) = warnings(msgspec.structs.replace(plan, groups=groups))
    assert finding.message.startswith("dp0,1.pp0 each compute ")
    assert (finding.hint or "").startswith("give layer 4 to stage 2 in every replica")
    assert codes(plan) == []


def test_receives_of_several_stages_share_the_allowance():
    """Two stages are four computes per micro-batch, so eight may come between."""
    text = print_plan(looped("looped-bfs", microbatches=12))
    assert codes(text) == []
    receives = "".join(f"  recv_act[1] {number}\n" for number in range(12))
    head, tail = text.split("stream dp=0,1 pp=1 {\n")
    for line in receives.splitlines(keepends=True):
        assert line in tail
        tail = tail.replace(line, "")
    (finding,) = warnings(head + "stream dp=0,1 pp=1 {\n" + receives + tail)
    assert finding.code == "RHP903"
    assert finding.message == (
        "`recv_act[1] 11` holds a buffer 11 computes longer than it has to (3 receives of this "
        "stream are early) (and in replica 1)"
    )


def test_an_exchange_at_a_later_stage():
    """Stage 1 of two micro-batches is exchanged between replicas that keep their stage 0."""
    streams = [
        "F 0; send_act 0 -> dp1; recv_grad 0 <- dp1; BW 0; reduce_grads; step",
        "recv_act 0@1 <- dp1; F 0@1; BW 0@1; send_grad 0@1 -> dp1; reduce_grads; step",
        "F 0; send_act 0 -> dp0; recv_grad 0 <- dp0; BW 0; reduce_grads; step",
        "recv_act 0@0 <- dp0; F 0@0; BW 0@0; send_grad 0@0 -> dp0; reduce_grads; step",
    ]
    (finding,) = warnings(plan_text(*streams, dp=2, microbatches=1))
    assert finding.code == "RHP905"
    assert "at stage 1: the migration cancels" in finding.message
    assert finding.related[0].message == "`F 0@0` of dp1.pp1"


def test_a_schedule_is_linted_for_what_it_has():
    """No transfers, but ranks, loads and homes."""
    plan = make_plan(tp=2, dp=2, pp=1, degrees={GroupName(1, 0): 1})
    streams = tuple(
        msgspec.structs.replace(s, body=tuple(i for i in s.body if i.op.is_compute))
        for s in plan.streams
    )
    schedule = msgspec.structs.replace(plan, level=Level.SCHEDULE, streams=streams)
    assert codes(schedule) == codes(plan) == ["RHP902", "RHP901"]
    assert [f.code for f in lint(parse(print_plan(schedule)), transport="eager=0")] == codes(plan)


@pytest.mark.parametrize("transport", ["edge", "rank", "eager=0", "eager=2KiB"])
def test_any_right_plan_can_be_linted(transport):
    """Whatever the language allows; every warning stands at a line and names its code."""
    rng = random.Random(11)
    for _ in range(25):
        parsed = parse(print_plan(generate(rng)))
        if verify(parsed, transport=transport) == []:
            for finding in lint(parsed, transport=transport):
                assert finding.severity is Severity.WARNING
                assert finding.code in CODES
                assert finding.span.line <= len(parsed.lines)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "zbv"])
def test_healthy_plans_of_several_stages_waste_nothing(schedule):
    """At any size."""
    model = msgspec.structs.replace(MODEL, layers=24)
    for pp, microbatches in itertools.product((2, 3, 4), (2, 4, 8)):
        batch = Batch(microbatches=microbatches, tokens=16)
        assert codes(initial_plan(model, Mesh(tp=1, pp=pp, dp=2), batch, schedule=schedule)) == []


# --- what the compiler makes


MESHES = [
    Mesh(tp=tp, pp=pp, dp=dp) for tp, pp, dp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2))
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_healthy_plans_of_the_compiler_waste_nothing(schedule):
    """At any size."""
    for mesh, microbatches in itertools.product(MESHES, (1, 2, 5)):
        batch = Batch(microbatches=microbatches, tokens=16)
        assert codes(initial_plan(MODEL, mesh, batch, schedule=schedule)) == []


def test_adapted_plans_of_the_compiler_are_only_out_of_balance():
    """A group that shrank takes longer, which is true; nobody is idle who could help."""
    found: set[str] = set()
    num_adapted = 0
    for mesh in MESHES:
        plan = initial_plan(MODEL, mesh, Batch(microbatches=4, tokens=16))
        for lost in ([0], [mesh.world - 1], [0, mesh.world // 2], [0, 1, 2]):
            try:
                adapted = adapt(
                    plan,
                    lost=[rank for rank in lost if rank < mesh.world],
                    step=3,
                    cluster=FREE_LINKS,
                ).plan
            except NoFeasiblePlan:
                continue
            num_adapted += 1
            found.update(codes(adapted))
    assert num_adapted > 20
    assert found <= {"RHP902", "RHP905"}


# --- the command line


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A plan that is right and wasteful, the mended one, and one with an error."""
    (tmp_path / "waste.plan").write_text(example_of("RHP906").bad)
    (tmp_path / "good.plan").write_text(example_of("RHP906").good)
    (tmp_path / "wrong.plan").write_text(example_of("RHP906").bad.replace("  BW 0\n", "", 1))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["waste.plan"], 0),
        (["--lint", "waste.plan"], 0),
        (["--lint", "--strict", "waste.plan"], 1),
        (["--strict", "waste.plan"], 0),
        (["--lint", "--strict", "good.plan"], 0),
        (["--lint", "wrong.plan"], 1),
    ],
)
def test_warnings_count_only_if_asked(capsys, files, argv, status):
    """The exit status says whether the plan may be deployed."""
    assert main(["verify", *argv]) == status
    assert ("warning[RHP906]" in capsys.readouterr().out) == (
        argv[0] == "--lint" and "waste.plan" in argv
    )


def test_a_plan_with_errors_is_not_linted(capsys, files):
    """What is wasted shows once it is clear what runs."""
    assert main(["verify", "--lint", "--format", "json", "wrong.plan"]) == 1
    (file,) = json.loads(capsys.readouterr().out)
    assert {finding["severity"] for finding in file["diagnostics"]} == {"error"}


@pytest.mark.parametrize("form", ["json", "github", "sarif"])
def test_warnings_are_warnings_in_every_format(capsys, files, form):
    """Not errors, and with their code."""
    assert main(["verify", "--lint", "--format", form, "waste.plan"]) == 0
    out = capsys.readouterr().out
    assert "RHP906" in out
    assert '"error"' not in out
    assert "::error" not in out


def test_every_warning_has_its_severity():
    """Whatever lint adds."""
    for code in (code for code in CODES if code.startswith("RHP9")):
        (finding,) = lint(parse(example_of(code).bad))
        assert finding.severity is Severity.WARNING
