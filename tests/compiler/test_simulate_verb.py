"""`resihp simulate`: a readable page and JSON, and clear words where there is nothing to play."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from plan_cases import plan_of

from resihp.cli import main
from resihp.compiler.facts import num_parameters
from resihp.compiler.policies.comparison import Comparison
from resihp.compiler.simulate.report import Report
from resihp.ir.printer import print_plan


@pytest.fixture
def plan_file(tmp_path, monkeypatch) -> str:
    """A plan of four groups of two, as a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("a.plan").write_text(print_plan(plan_of()))
    return "a.plan"


def report(capsys, *arguments: str) -> Report:
    assert main(["simulate", "--format", "json", *arguments]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=Report)


def test_the_page_names_time_bubbles_memory_and_the_busiest_group(plan_file, capsys):
    assert main(["simulate", plan_file]) == 0
    page = capsys.readouterr().out
    for word in ("iteration", "tokens/s", "bubble s", "utilisation", "busiest", "memory", "pp1"):
        assert word in page


def test_json_has_the_figures_of_every_group(plan_file, capsys):
    found = report(capsys, plan_file)
    assert [group.group for group in found.groups] == ["dp0.pp0", "dp1.pp0", "dp0.pp1", "dp1.pp1"]
    assert all(group.busy_s + group.bubble_s <= found.iteration_s for group in found.groups)
    assert all(0 < group.peak_bytes <= found.memory_bytes for group in found.groups)


def test_a_slow_rank_makes_its_group_the_busiest(plan_file, capsys):
    healthy, slowed = report(capsys, plan_file), report(capsys, plan_file, "--slow", "rank=6:0.5")
    assert slowed.iteration_s > healthy.iteration_s
    assert max(slowed.groups, key=lambda group: group.busy_s).group == "dp1.pp1"


def test_lengths_set_the_time_of_every_micro_batch(plan_file, capsys):
    """Half as many tokens take less time; lines that are too long are refused."""
    Path("short").write_text("[8, 8]\n")
    assert report(capsys, plan_file, "--lengths", "short").compute_s < (
        report(capsys, plan_file).compute_s
    )
    Path("long").write_text("[33]\n")
    assert main(["simulate", plan_file, "--lengths", "long"]) == 2
    assert "long:1: 33 tokens" in capsys.readouterr().err


def test_transfers_between_nodes_are_told_and_may_queue(plan_file, capsys):
    """Nodes of two devices: every tensor crosses."""
    Path("c.toml").write_text(
        '[cluster]\nname = "pairs"\nnodes = 4\ngpus_per_node = 2\n'
        "[device]\nmemory_gib = 1\nbf16_tflops = 1\nfp32_tflops = 1\n"
        "[intra_node]\ngb_per_s = 1\nlatency_us = 1\n"
        "[inter_node]\ngb_per_s = 1e-3\nlatency_us = 1\n"
    )
    free = report(capsys, plan_file, "--cluster", "c.toml")
    sent = [(link.source, link.target) for link in free.links if link.num_bytes]
    assert sorted(sent) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    reduced = {(link.source, link.target): link.reduced_bytes for link in free.links}
    holders = {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert {link for link, num_bytes in reduced.items() if num_bytes} == holders
    # Two replicas: each sends the gradients of its stage to the other once.
    parameters = num_parameters(plan_of().model, plan_of().groups[0].sole_layers, 1)
    assert reduced[0, 2] == pytest.approx(4 * parameters, rel=0.05)
    queued = report(capsys, plan_file, "--cluster", "c.toml", "--contention")
    assert queued.iteration_s > free.iteration_s
    assert main(["simulate", plan_file, "--cluster", "c.toml"]) == 0
    assert "node 0 -> 1" in capsys.readouterr().out


def test_devices_with_less_memory_than_the_plan_counts_on_are_told(tmp_path, capsys):
    """What it states, and what it needs where that is more than there is."""
    stated = tmp_path / "stated.plan"
    stated.write_text(print_plan(plan_of(memory_bytes=80 << 30)))
    assert (
        "a device of cpu-box has 2 GiB and the plan states 80 GiB"
        in (report(capsys, str(stated), "--cluster", "cpu-box").warnings[0])
    )
    small = tmp_path / "small.toml"
    small.write_text(
        '[cluster]\nname = "small"\nnodes = 4\ngpus_per_node = 2\n'
        "[device]\nmemory_gib = 1e-5\nbf16_tflops = 1\nfp32_tflops = 1\n"
        "[intra_node]\ngb_per_s = 1\nlatency_us = 1\n"
        "[inter_node]\ngb_per_s = 1\nlatency_us = 1\n"
    )
    for verb in ("simulate", "adapt"):
        assert main([verb, str(stated), "--cluster", str(small)]) == 0
        warning = capsys.readouterr().err
        assert "warning: a device of small has" in warning
        assert "cannot run there" in warning


def test_a_lost_rank_in_the_plan_is_named(plan_file, capsys):
    assert main(["simulate", plan_file, "--fail", "rank=5"]) == 2
    assert "rank 5 is lost, and dp1.pp0" in capsys.readouterr().err


def test_a_plan_with_findings_is_not_played(plan_file, capsys):
    text = Path(plan_file).read_text()
    Path("broken.plan").write_text(text.replace("  send_act 1\n", "", 1))
    assert main(["simulate", "broken.plan"]) == 1
    shown = capsys.readouterr()
    assert "RHP4" in shown.err
    assert not shown.out


def test_a_schedule_is_played_too(plan_file, capsys):
    """Without reductions and updates, which a schedule does not name."""
    lines = Path(plan_file).read_text().splitlines()
    kept = [
        line
        for line in lines
        if not line.strip().startswith(("send", "recv", "reduce", "step", "scatter", "gather"))
    ]
    Path("a.schedule").write_text("\n".join(kept).replace("plan 1", "schedule 1", 1) + "\n")
    found = report(capsys, "a.schedule")
    assert found.level == "schedule"
    assert found.iteration_s == found.compute_s


def test_the_page_fits_a_terminal(plan_file, capsys):
    assert main(["simulate", plan_file, "--slow", "rank=3:0.7"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_policies_are_compared_on_the_failures_of_the_command_line(plan_file, capsys):
    """One row each, in the order asked for; who has no answer stops."""
    arguments = ["simulate", plan_file, "--compare", "none,recycle,resihp", "--fail", "rank=1"]
    assert main(arguments) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["fault-free", "none", "recycle", "resihp"]
    assert "stops" in rows[2]
    assert "rank 1 is lost" in rows[2]
    assert main([*arguments, "--format", "json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    assert [row.iteration_s is None for row in found.rows] == [True, False, False]
    assert found.rows[2].tokens_per_s >= found.rows[1].tokens_per_s
    assert found.rows[2].num_gpus in (6, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "recicle"], "did you mean recycle?"),
        (["--compare", "all", "--contention"], "without --contention"),
    ],
)
def test_what_cannot_be_compared_is_said(plan_file, capsys, arguments, said):
    assert main(["simulate", plan_file, *arguments]) == 2
    assert said in capsys.readouterr().err
