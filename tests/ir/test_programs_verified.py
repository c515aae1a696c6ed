"""Programs are verified alone and as the set of a job: against runs, and against their plan."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Sequence

import plan_generator
import plan_mutator
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_build import make_plan
from program_mutator import MUTATIONS, mutate_programs
from program_oracle import fault_of
from staged_plans import random_staged

from resihp.cli import main
from resihp.errors import PlanSyntaxError, UserError
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.expand import expand
from resihp.ir.model import GroupName, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.program import Program
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.verify import verify
from resihp.ir.verify.programs import verify_programs

seeds = st.integers(0, 10**9).map(random.Random)


def programs_of(plan: Plan) -> list[Program]:
    return [expand(plan, rank) for rank in plan.active_ranks]


def text_of(programs: Sequence[Program]) -> str:
    return "\n".join(map(print_program, programs))


def findings(text: str, transport: str | None = None) -> list[Diagnostic]:
    (found,) = verify_programs([parse_programs(text)], transport=transport)
    return found


def codes(text: str, transport: str | None = None) -> list[str]:
    return [finding.code for finding in findings(text, transport)]


def some_plan(rng: random.Random) -> Plan:
    if rng.random() < 0.5:
        return random_staged(rng).plan
    return plan_generator.generate(rng, plan_generator.EXECUTABLE)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_the_programs_of_a_right_plan_are_right(rng: random.Random):
    """Together and each alone; the slow oracle agrees."""
    programs = programs_of(some_plan(rng))
    assert fault_of(programs) is None
    assert codes(text_of(programs)) == []
    assert [codes(print_program(program)) for program in programs] == [[]] * len(programs)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@given(rng=seeds)
@settings(max_examples=25, deadline=None)
def test_programs_that_run_wrong_are_refused(mutation, rng: random.Random):
    """One program is changed; where the oracle hangs or mixes tensors up there is a finding."""
    changed = mutate_programs(rng, programs_of(some_plan(rng)), mutation)
    if changed is None or len(changed) == 1:
        return
    fault = fault_of(changed)
    event("runs wrong" if fault else "runs right")
    assert fault is None or codes(text_of(changed))


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_a_set_of_programs_is_right_exactly_if_their_plan_is(rng: random.Random):
    """Plans with mistakes; those that cannot be expanded are refused too."""
    plan = plan_generator.generate(rng, plan_generator.EXECUTABLE)
    plan, _ = plan_mutator.mutate(plan, rng)
    try:
        parsed = parse(print_plan(plan))
    except UserError:
        return
    found = [finding.code for finding in verify(parsed)]
    try:
        programs = programs_of(plan)
    except UserError:
        assert found
        return
    if len(programs) > 1:
        event("wrong" if found else "right")
        assert bool(codes(text_of(programs))) == bool(found)


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_files_may_be_split_anyhow(rng: random.Random):
    """The same findings, each in the file of its program."""
    programs = programs_of(random_staged(rng).plan)
    changed = mutate_programs(rng, programs, rng.choice(MUTATIONS)) or programs
    if len(changed) == 1:
        return
    together = findings(text_of(changed))
    files = [
        parse_programs(print_program(program), path=f"r{program.rank}.program")
        for program in changed
    ]
    apart = verify_programs(files)
    assert sorted(f.code for f in together) == sorted(f.code for found in apart for f in found)
    for (parsed,), found in zip(files, apart, strict=True):
        for finding in found:
            assert 1 <= finding.span.line <= parsed.text.count("\n")
            assert all(place.path != parsed.path for place in finding.related)


# --- together --------------------------------------------------------------------------------

PLAN = make_plan(pp=2, dp=2, tp=2, microbatches=2, degrees={GroupName(1, 0): 1})
"""Ranks 0,1 | 2,3 and 4 | 6,7; 5 is standby."""
SET = text_of(programs_of(PLAN))


def edited(rank: int, old: str, new: str, text: str = SET) -> str:
    """`text` with one change in the program of `rank`."""
    before, mark, _ = text.partition(f"\nrank {rank} ")
    head = before.rfind("program 1")
    rest = text[head:]
    end = rest.find("\nprogram 1")
    end = len(rest) if end < 0 else end
    assert mark, rank
    assert old in rest[:end], (rank, old)
    return text[:head] + rest[:end].replace(old, new, 1) + rest[end:]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            edited(4, "send_act 0@1 -> 6:0/2,7:1/2", "send_act 0@1 -> 2:0/2,3:1/2"),
            "RHP414",
            "`send_act 0@1` of rank 4 names rank 2,3, but dp1.pp1, whose ranks are 6,7, is at the "
            "other end",
        ),
        (
            edited(2, "send_grad 0@0 -> 0 ", "send_grad 0@0 -> 1 "),
            "RHP420",
            "`send_grad 0@0` of rank 2 has `-> 1 16x64xf32`, the other end needs "
            "`-> 0 16x64xf32`",
        ),
        (
            edited(6, "<- 4:0/2 8x64xf32", "<- 4:1/2 8x64xf32"),
            "RHP420",
            "`recv_act 0@1` of rank 6 has `<- 4:1/2 8x64xf32`, the other end needs "
            "`<- 4:0/2 8x64xf32`",
        ),
        (
            edited(0, "send_act 0@0 -> 2 ", "send_act 0@0 -> 5 "),
            "RHP421",
            "`send_act 0@0` of rank 0: there is no program of rank 5",
        ),
        (
            text_of(programs_of(PLAN)[:-1]),
            "RHP421",
            "dp1.pp1 has 2 members; the program of member 1 is not here",
        ),
        (
            text_of([p for p in programs_of(PLAN) if p.stages == (0,)]),
            "RHP421",
            "no program here runs stage 1",
        ),
        (SET + SET[: SET.index("\nprogram 1")], "RHP421", "a second program of rank 0"),
        (
            edited(3, "layers=4..7", "layers=4..7,8..9").replace("layers=8 ", "layers=10 "),
            "RHP424",
            "1 stages cannot hold 2 ranges of layers",
        ),
        (edited(1, "  step\n", ""), "RHP422",
         "rank 1 runs nothing more as number 10, rank 0 of the same group `step`"),
        (edited(1, "tokens=16", "tokens=32"), "RHP423",
         "the `batch` line differs from that of rank 0"),
        (
            edited(1, "member=1", "member=0"),
            "RHP424",
            "member 0 of dp0.pp0 is rank 0 too",
        ),
        (
            edited(7, "layers=4..7", "layers=5..7"),
            "RHP424",
            "stage 1 is layers 5..7 at pp1 here, layers 4..7 at pp1 in the program of rank 2",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_set_is_said(text: str, code: str, message: str):
    """The first finding; others may follow from it."""
    found = findings(text)
    assert (found[0].code, found[0].message) in [(code, message)] or (code, message) in [
        (finding.code, finding.message) for finding in found
    ]


def test_a_group_that_sends_nothing_is_named_at_the_other_end():
    """The only member of dp1.pp0 drops a send: the receivers wait for ever."""
    text = edited(4, "  send_act 0@1 -> 6:0/2,7:1/2 8x64xf32\n", "")
    (finding,) = [f for f in findings(text) if f.code == "RHP401"]
    assert finding.message.startswith("`recv_act 0@1` has no send: dp1.pp0 lacks `send_act 0`")
    assert "RHP408" in codes(text)


def test_a_deadlock_is_told_file_by_file():
    """Lines of other files are named with their file."""
    plan = make_plan(microbatches=1)
    swapped = "  send_act 0@0 -> 1 16x64xf32\n  recv_grad 0@0 <- 1 16x64xf32\n  BW 0@0\n"
    lines = swapped.splitlines(keepends=True)
    late = edited(0, swapped, lines[1] + lines[2] + lines[0], text_of(programs_of(plan)))
    first, second = late.split("\n\nprogram")
    files = [
        parse_programs(first, path="r0.program"),
        parse_programs("program" + second, path="r1.program"),
    ]
    found = verify_programs(files)
    (finding,) = found[0]
    assert finding.code == "RHP501"
    assert finding.related[0].message == (
        "dp0.pp0 waits here for `send_grad 0@0` of dp0.pp1 (r1.program line 12), which comes after "
        "`F 0@0` (r1.program line 10)"
    )
    assert finding.hint is not None
    assert "(r0.program line 11)" in finding.hint
    assert found[1] == []


@pytest.mark.parametrize("transport", ["edge", "pair", "rank", "eager=0", "eager=1MiB"])
def test_progress_is_proved_under_the_named_transport(transport: str):
    """As for the plan."""
    plan = make_plan(pp=2, microbatches=3)
    under = [f.code for f in verify(parse(print_plan(plan)), transport=transport)]
    assert codes(text_of(programs_of(plan)), transport) == under
    assert (under == []) == (transport in ("edge", "eager=1MiB"))


def test_an_unknown_transport_is_wrong_use():
    """As for the plan."""
    with pytest.raises(UserError, match="unknown transport"):
        findings(SET, "telepathy")


# --- alone -----------------------------------------------------------------------------------

ALONE = print_program(expand(PLAN, 4))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  F 0@1\n", "", ["RHP301"]),
        ("  BW 0@1\n", "  BW 0@1\n  BW 0@1\n", ["RHP302"]),
        ("  BW 0@1\n", "  B 0@1\n", ["RHP303"]),
        ("  BW 0@1\n", "  B 0@1\n  W 0@1\n  BW 0@1\n", ["RHP304"]),
        ("  send_act 0@1 -> 6:0/2,7:1/2 8x64xf32\n", "", ["RHP404"]),
        ("  recv_grad 0@1 <- 6:0/2,7:1/2 8x64xf32\n", "", ["RHP404"]),
        ("  gather_grad 0@1\n", "", ["RHP409"]),
        ("  scatter_act 0@1\n", "", ["RHP409"]),
        ("  F 0@1\n  scatter_act 0@1\n", "  scatter_act 0@1\n  F 0@1\n", ["RHP408"]),
        ("  gather_grad 0@1\n  BW 0@1\n", "  BW 0@1\n  gather_grad 0@1\n", ["RHP408"]),
        ("  step\n", "  step\n  free_params\n", ["RHP417", "RHP705"]),
        ("  reduce_grads\n", "", ["RHP701"]),
        ("  step\n", "", ["RHP702"]),
        ("  F 1@1\n", "  F 5@1\n  F 1@1\n", ["RHP104"]),
        ("  F 1@1\n", "  F 0@9\n  F 1@1\n", ["RHP105"]),
        ("  step\n", "  reduce_grads[1]\n  step\n", ["RHP109"]),
        ("  F 1@1\n", "  F 1@1 & BW 1@1\n", ["RHP110", "RHP302"]),
        ("6:0/2,7:1/2", "6:0/2,9:1/2", ["RHP101"]),
        ("6:0/2,7:1/2", "6:0/2,4:1/2", ["RHP415"]),
        ("6:0/2,7:1/2", "6:0/2,6:1/2", ["RHP425"]),
        ("6:0/2,7:1/2", "7:1/2,6:0/2", ["RHP425"]),
        ("6:0/2,7:1/2", "6:0/2", ["RHP425"]),
        ("6:0/2,7:1/2", "6:0/2,7:1/4", ["RHP425"]),
        ("6:0/2,7:1/2", "6:0/0", ["RHP425"]),
        ("6:0/2,7:1/2", "6:0/4", ["RHP425"]),
        ("8x64xf32", "16x64xf32", ["RHP426"]),
        ("tokens=16", "tokens=15", ["RHP411"] * 4),
        ("send_act 0@1 -> 6:0", "send_grad 0@1 -> 6:0", ["RHP404", "RHP407", "RHP409"]),
        ("rank 4 ", "rank 9 ", ["RHP101"]),
        ("group=dp1.pp0", "group=dp2.pp0", ["RHP102"]),
        ("layers=0..3", "layers=0..9", ["RHP103", "RHP424"]),
        ("kv_heads=4", "kv_heads=3", ["RHP108"]),
        ("tp=1 layers", "tp=3 layers", ["RHP203"]),
        ("tp=1 layers", "tp=0 layers", ["RHP203", "RHP424"]),
        ("member=0", "member=1", ["RHP424"]),
        ("stages=0", "stages=1", ["RHP424"]),
        ("of=2", "of=1", ["RHP424"]),
        ("stages=0 of=2", "stages=3 of=2", ["RHP424"]),
        ("layers=0..3 stages=0", "layers=2..3,0..1 stages=0,1", ["RHP424"]),
    ],
)  # fmt: skip
def test_what_one_program_shows_is_said(old: str, new: str, expected: list[str]):
    """Without the programs of the others."""
    assert old in ALONE
    assert sorted(codes(ALONE.replace(old, new, 1))) == expected


def test_stages_that_follow_each_other_hand_over_in_place():
    """A program with two stages: what is made here for here is never sent."""
    plan = make_plan(pp=1, microbatches=1)
    group = plan.groups[0]
    whole = print_program(expand(plan, 0))
    text = whole.replace("layers=0..7 stages=0 of=1", "layers=0..3,4..7 stages=0,1 of=2")
    body = "F[0] 0@0\n  F[1] 0@0\n  BW[1] 0@0\n  BW[0] 0@0\n  reduce_grads[0]\n  reduce_grads[1]\n"
    text = text.replace("F 0@0\n  BW 0@0\n  reduce_grads\n", body)
    assert group.tp == 1
    assert codes(text) == []
    assert codes(text.replace("F[0] 0@0\n  F[1] 0@0", "F[1] 0@0\n  F[0] 0@0")) == ["RHP416"]
    send = text.replace("  F[1] 0@0\n", "  send_act[0] 0@0 -> 0 16x64xf32\n  F[1] 0@0\n")
    assert codes(send) == ["RHP415", "RHP415"]


# --- the command -----------------------------------------------------------------------------


def test_verify_reads_programs(tmp_path, capsys):
    """One alone, all in one file, all in files; a fault is in the file of its program."""
    for program in programs_of(PLAN):
        (tmp_path / f"r{program.rank}.program").write_text(print_program(program))
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(["verify", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{file}: ok" for file in files]
    assert main(["verify", files[0]]) == 0
    text = (tmp_path / "r4.program").read_text()
    (tmp_path / "r4.program").write_text(text.replace("6:0/2,7:1/2", "7:0/2,6:1/2", 1))
    assert main(["verify", *files]) == 1
    out = capsys.readouterr().out
    assert f"{files[4]}:11:3: error[RHP420]" in out
    assert f"{files[5]}:9:3: note: rank 6 receives it here\n 9 |   recv_act 0@1 <- 4:0/2" in out
    assert main(["verify", "--format", "github", *files]) == 1
    assert "%0A" in capsys.readouterr().out


def test_an_unreadable_program_leaves_the_others_alone(tmp_path, capsys):
    """Without it the set is not whole; each other file is verified for itself."""
    first, second = tmp_path / "a.program", tmp_path / "b.program"
    first.write_text(print_program(expand(PLAN, 0)).replace("  F 0@0\n", "  F x\n"))
    second.write_text(print_program(expand(PLAN, 2)))
    assert main(["verify", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert "RHP001" in out
    assert out.endswith(f"{second}: ok\n")


def test_programs_have_no_plan_before(tmp_path, capsys):
    """What ran before is said by plans."""
    file, plan = tmp_path / "a.program", tmp_path / "a.plan"
    file.write_text(SET)
    plan.write_text(print_plan(PLAN))
    assert main(["verify", "--previous", str(plan), str(file)]) == 2
    assert "--previous goes with plans" in capsys.readouterr().err


def test_plans_and_programs_may_be_verified_in_one_command(tmp_path, capsys):
    """In the order in which they are named."""
    file, plan = tmp_path / "a.program", tmp_path / "b.plan"
    file.write_text(SET)
    plan.write_text(print_plan(PLAN))
    assert main(["verify", str(plan), str(file)]) == 0
    assert capsys.readouterr().out == f"{plan}: ok\n{file}: ok\n"


@given(seeds, st.data())
@settings(max_examples=150, deadline=None)
def test_no_numbers_crash_the_verifier(rng: random.Random, data):
    """Any numbers anywhere in a program, alone and in a set."""
    programs = programs_of(some_plan(rng))[:3]
    words = re.split(r"(\d+)", text_of(programs[: rng.randint(1, 3)]))
    for _ in range(rng.randint(1, 3)):
        at = data.draw(st.integers(0, len(words) // 2 - 1)) * 2 + 1
        words[at] = str(rng.choice((0, 1, 2, 3, 5, 8, 100, 10**6, 10**9)))
    with contextlib.suppress(PlanSyntaxError):
        findings("".join(words))


def test_huge_numbers_are_refused_at_once():
    """Nothing is made as large as a program says."""
    for old, new in (("tp=1 layers", "tp=1000000000 layers"), ("of=2", "of=1000000000")):
        assert codes(ALONE.replace(old, new))
    assert codes(ALONE.replace("6:0/2", "6:0/1000000000", 1))
    program = replace(expand(PLAN, 4), stages=(10**9,), num_stages=10**9)
    assert codes(print_program(program))
