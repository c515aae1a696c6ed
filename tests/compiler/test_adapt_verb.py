"""`resihp adapt`: the plan on stdout or in a file, the decision beside it, faults in a sentence."""

from __future__ import annotations

import json

import pytest
from plan_cases import findings, plan_of

from resihp.cli import main
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan


@pytest.fixture
def healthy(tmp_path):
    """A plan of 12 ranks in a file."""
    path = tmp_path / "healthy.plan"
    path.write_text(print_plan(plan_of(tp=2, pp=2, dp=3)))
    return path


def test_the_plan_goes_to_stdout_and_the_decision_to_stderr(healthy, capsys):
    """What is printed is a plan that may follow the one before."""
    assert main(["adapt", str(healthy), "--fail", "rank=5", "--slow", "rank=8:0.5"]) == 0
    printed = capsys.readouterr()
    plan = parse(printed.out).plan
    assert plan.lost == (5,)
    assert findings(plan, parse(healthy.read_text()).plan) == []
    assert "unchanged it cannot run" in printed.err
    assert printed.err.count(": chosen") == 1


def test_json_holds_the_decision_and_the_text_of_the_plan(healthy, capsys, tmp_path):
    """And the same plan is in the file that was asked for."""
    out = tmp_path / "new.plan"
    words = ["adapt", str(healthy), "--fail", "rank=5", "--resume", "7"]
    assert main([*words, "--format", "json", "-o", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == out.read_text()
    assert "resume step=7 keep=none" in record["text"]
    assert record["no_change_s"] is None
    assert record["chosen"] in {each["name"] for each in record["considered"]}


def test_options_bound_what_may_change(healthy, capsys):
    """Whole micro-batches and layers that stay: no peer and no other layers in the plan."""
    words = ["--slow", "rank=8:0.3", "--whole-microbatches", "--keep-layers"]
    assert main(["adapt", str(healthy), *words]) == 0
    plan, before = parse(capsys.readouterr().out).plan, parse(healthy.read_text()).plan
    assert [group.layers for group in plan.groups] == [group.layers for group in before.groups]
    assert all(instr.peer is None for stream in plan.streams for instr in stream.body)


def test_documents_of_a_file_set_the_simulated_times(healthy, capsys, tmp_path):
    """Half of the micro-batches are half as long; what is decided is what `simulate` then says."""
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("[16, 16]\n[8]\n")
    words = ["adapt", str(healthy), "--fail", "rank=5", "--format", "json"]
    new = tmp_path / "new.plan"
    assert main([*words, "--lengths", str(lengths), "-o", str(new)]) == 0
    short = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    assert short["iteration_s"] < json.loads(capsys.readouterr().out)["iteration_s"]
    words = ["simulate", str(new), "--lengths", str(lengths), "--format", "json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["iteration_s"] == short["iteration_s"]


def test_a_rank_that_is_back_is_used_where_that_pays(healthy, capsys, tmp_path):
    """In a group or standby: so small a model is not always faster on more ranks."""
    degraded = tmp_path / "degraded.plan"
    assert main(["adapt", str(healthy), "--fail", "rank=5", "-o", str(degraded)]) == 0
    assert main(["adapt", str(degraded), "--rejoin", "rank=5"]) == 0
    plan = parse(capsys.readouterr().out).plan
    assert plan.lost == ()
    assert plan.returned == (5,)
    assert 5 in (*plan.active_ranks, *plan.standby)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--fail", "rank=99"], 2, "nearest valid: 11"),
        (["--rejoin", "rank=3"], 2, "rank 3 cannot return"),
        (["--least-gain", "2"], 2, "must be from 0 to below 1"),
        (["--resume", "-1"], 2, "nearest valid: 0"),
        (["--budget", "-1"], 2, "nearest valid: 0"),
        (["--fail", "rank=0,1,4,5,8,9"], 4, "no live rank still holds"),
    ],
)
def test_faults_are_told_in_a_sentence(healthy, capsys, words, status, said):
    """Wrong use is 2, a loss that no plan can carry is 4."""
    assert main(["adapt", str(healthy), *words]) == status
    assert said in capsys.readouterr().err


def test_a_schedule_is_to_be_lowered_first(tmp_path, capsys):
    """It says how."""
    path = tmp_path / "x.schedule"
    text = print_plan(plan_of(tp=1, pp=1, dp=1, microbatches=1, schedule="gpipe"))
    lines = text.replace("plan 1", "schedule 1").splitlines()
    path.write_text(
        "\n".join(line for line in lines if "reduce" not in line and "step" not in line)
    )
    assert main(["adapt", str(path)]) == 2
    assert "`resihp lower` it first" in capsys.readouterr().err


def test_another_policy_may_decide(healthy, capsys):
    """Its plan is verified like ours; where it has no answer that is told."""
    assert main(["adapt", str(healthy), "--slow", "rank=8:0.5", "--policy", "none"]) == 0
    printed = capsys.readouterr()
    assert printed.out == healthy.read_text()
    assert "nothing changes" in printed.err
    assert main(["adapt", str(healthy), "--fail", "rank=5", "--policy", "none"]) == 4
    assert main(["adapt", str(healthy), "--policy", "recicle"]) == 2
    assert "did you mean recycle?" in capsys.readouterr().err


def test_min_holders_must_be_a_number_of_groups(healthy, capsys):
    """From 1, which looks at time alone."""
    words = ["adapt", str(healthy), "--fail", "rank=5", "--min-holders"]
    assert main([*words, "1"]) == 0
    assert main([*words, "0"]) == 2
    assert "--min-holders 0: must be at least 1" in capsys.readouterr().err
