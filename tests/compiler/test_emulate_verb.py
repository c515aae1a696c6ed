"""`resihp emulate`: the emulated time beside the simulated one, and where a bad plan gets stuck."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from plan_cases import plan_of
from test_emulation import DEADLOCK

from resihp.cli import main
from resihp.executor.emulation.report import EmulationReport
from resihp.ir.printer import print_plan


@pytest.fixture
def plan_file(tmp_path, monkeypatch) -> str:
    """A plan of four groups of two, as a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("a.plan").write_text(print_plan(plan_of()))
    return "a.plan"


def report(capsys, *arguments: str) -> EmulationReport:
    assert main(["emulate", "--format", "json", *arguments]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=EmulationReport)


def test_the_page_says_that_it_is_emulated_and_how_far_off(plan_file, capsys):
    assert main(["emulate", plan_file, "--virtual"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("emulated devices: 8 ranks")
    for word in ("s emulated", "simulated", "error", "virtual time"):
        assert word in page


def test_virtual_time_is_that_of_the_simulator_in_any_health(plan_file, capsys):
    healthy = report(capsys, plan_file, "--virtual")
    slowed = report(capsys, plan_file, "--virtual", "--slow", "rank=6:0.5")
    for found in (healthy, slowed):
        assert found.devices == "emulated"
        assert found.error == pytest.approx(0, abs=1e-6)
    assert slowed.iteration_s > healthy.iteration_s


def test_real_time_takes_no_less_than_its_time_and_tells_the_error(plan_file, capsys):
    found = report(capsys, plan_file, "--iterations", "2")
    assert found.time == "real"
    assert found.error is not None
    assert found.error >= 0
    assert found.device_s == pytest.approx(found.simulated_s, abs=2e-3)


def test_times_are_scaled(plan_file, capsys):
    once = report(capsys, plan_file, "--virtual")
    longer = report(capsys, plan_file, "--virtual", "--time-scale", "8")
    assert longer.iteration_s == pytest.approx(8 * once.iteration_s, rel=1e-6)
    assert longer.simulated_s == pytest.approx(longer.iteration_s, rel=1e-6)


def test_a_plan_that_gets_stuck_is_refused_in_real_time_and_played_in_virtual_time(
    plan_file, capsys
):
    Path("bad.plan").write_text(DEADLOCK)
    assert main(["emulate", "bad.plan"]) == 1
    assert "--virtual shows" in capsys.readouterr().err
    assert main(["emulate", "bad.plan", "--virtual"]) == 1
    told = capsys.readouterr()
    assert "rank 1 of dp0.pp1 waits at `F 1`" in told.err
    assert not told.out


def test_a_plan_whose_messages_are_out_of_order_has_no_time(plan_file, capsys):
    """Without a deadlock there is nothing to play, and the finding decides the exit status."""
    lines = print_plan(plan_of(tp=1, pp=2, dp=1, schedule="gpipe")).splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip() == "recv_act 0")
    second = next(i for i, line in enumerate(lines) if line.strip() == "recv_act 1")
    received = lines.pop(second)
    lines.insert(first, received)
    Path("bad.plan").write_text("\n".join(lines) + "\n")
    assert main(["emulate", "bad.plan", "--virtual"]) == 1
    told = capsys.readouterr()
    assert "error[RHP412]" in told.err
    assert "hint: --virtual" not in told.err
    assert not told.out


def test_a_plan_with_other_errors_is_refused(plan_file, capsys):
    text = print_plan(plan_of()).replace("send_act 0\n", "", 1)
    Path("bad.plan").write_text(text)
    assert main(["emulate", "bad.plan", "--virtual"]) == 1
    assert "error[" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--iterations", "0"),
        ("--time-scale", "0"),
        ("--time-scale", "nan"),
        ("--slow", "rank=99:0.5"),
    ],
)
def test_wrong_use_is_told_without_a_traceback(plan_file, capsys, arguments):
    assert main(["emulate", plan_file, *arguments]) == 2
    assert "resihp: error:" in capsys.readouterr().err
