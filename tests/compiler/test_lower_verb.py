"""`resihp lower`: schedules in, verified plans out, and clear words for everything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resihp.cli import lower as lower_verb
from resihp.cli import main
from resihp.compiler.lower import PASSES
from resihp.ir.parser import parse
from resihp.ir.printer import format_text

PAGE = (Path(__file__).parents[2] / "docs" / "plan-language.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```schedule v.schedule\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def schedule(tmp_path, monkeypatch) -> Path:
    """The example of the documentation as a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "v.schedule"
    path.write_text(EXAMPLE)
    return path


@pytest.mark.usefixtures("schedule")
def test_what_is_printed_is_canonical(capsys):
    """`fmt` would leave it alone."""
    assert main(["lower", "v.schedule"]) == 0
    printed = capsys.readouterr().out
    assert format_text(parse(printed)) == printed


@pytest.mark.usefixtures("schedule")
def test_the_plan_names_the_transport_that_it_is_made_for(capsys):
    """So `verify` proves progress under it without being told."""
    assert main(["lower", "--transport", "rank", "v.schedule", "-o", "v.plan"]) == 0
    assert capsys.readouterr().out == ""
    assert "\ntransport rank\n" in Path("v.plan").read_text()
    assert main(["verify", "v.plan"]) == 0
    assert main(["verify", "--transport", "eager=0", "v.plan"]) == 0


@pytest.mark.usefixtures("schedule")
def test_late_receives_are_for_edge_only(capsys):
    """The same schedule made for `edge` hangs with one queue per rank."""
    assert main(["lower", "v.schedule", "-o", "v.plan"]) == 0
    assert main(["verify", "v.plan"]) == 0
    assert main(["verify", "--transport", "rank", "v.plan"]) == 1
    assert "deadlock under transport `rank`" in capsys.readouterr().out


@pytest.mark.usefixtures("schedule")
def test_what_a_pass_makes_can_be_seen(capsys):
    """After `finish` there are reductions and no transfers yet."""
    assert main(["lower", "--print-after", "finish", "v.schedule"]) == 0
    printed = capsys.readouterr().out
    assert "reduce_grads[3]" in printed
    assert "send_act" not in printed


def test_tensors_are_cut_between_equal_degrees_if_that_is_wished(schedule, capsys):
    """`--scatter always`; by default they go whole."""
    schedule.write_text(
        EXAMPLE.replace("mesh tp=1", "mesh tp=2")
        .replace("ranks=0 ", "ranks=0,1 ")
        .replace("ranks=1 ", "ranks=2,3 ")
    )
    assert main(["lower", "v.schedule"]) == 0
    assert "scatter" not in capsys.readouterr().out
    assert main(["lower", "--scatter", "always", "v.schedule"]) == 0
    assert "scatter_act[0] 0" in capsys.readouterr().out


def test_a_schedule_that_waits_for_itself_is_refused_with_the_circle(schedule, capsys):
    """Nothing is lowered; the finding points into the schedule."""
    text = EXAMPLE.replace("  F[3] 0\n  BW[3] 0\n  BW[0] 0\n", "  BW[0] 0\n  F[3] 0\n  BW[3] 0\n")
    schedule.write_text(text)
    assert main(["lower", "v.schedule"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"v\.schedule:\d+:3: error\[RHP501\]: deadlock", said.err)


def test_a_plan_is_told_from_a_schedule(schedule, capsys):
    """The message says which first line lowers."""
    main(["lower", "v.schedule", "-o", "v.plan"])
    assert main(["lower", "v.plan"]) == 2
    assert "a plan already" in capsys.readouterr().err


def test_passes_are_called_as_the_compiler_calls_them():
    """The option names what there is."""
    assert lower_verb._PASSES == PASSES


def test_torchs_csv_of_computing_alone_is_a_schedule(tmp_path, monkeypatch, capsys):
    """Two stages of one micro-batch; torch's I and W are B and W."""
    monkeypatch.chdir(tmp_path)
    Path("two.csv").write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert main(["lower", "two.csv", "-o", "two.plan"]) == 0
    assert main(["verify", "two.plan"]) == 0
    assert "  recv_grad 0\n  B 0\n  W 0\n" in Path("two.plan").read_text()
    capsys.readouterr()
    Path("two.csv").write_text("0F0,0I0,0W0\n1I0,1F0,1W0\n")
    assert main(["lower", "two.csv"]) == 1
    assert "row 1, cell 0: `1I0`" in capsys.readouterr().err


@pytest.mark.usefixtures("schedule")
def test_an_unknown_transport_is_wrong_use(capsys):
    """The message names those that there are."""
    assert main(["lower", "--transport", "edgy", "v.schedule"]) == 2
    assert "`edge`, `pair`, `rank`" in capsys.readouterr().err


def test_a_text_that_cannot_be_read_gives_its_faults(schedule, capsys):
    """As `verify` would."""
    schedule.write_text(EXAMPLE.replace("BW[0] 0", "send_act[0] 0"))
    assert main(["lower", "v.schedule"]) == 1
    assert "RHP007" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_not_printed(schedule, capsys):
    """The order alone may fit a device that has no room for buffers: both are verified."""
    schedule.write_text(EXAMPLE.replace("\nbatch ", "\nmemory 1MiB\nbatch "))
    assert main(["lower", "v.schedule"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "RHP602" in said.err


@pytest.mark.usefixtures("schedule")
def test_a_place_that_cannot_be_written_is_said(capsys):
    """With the reason of the system."""
    assert main(["lower", "v.schedule", "-o", "no/such/folder.plan"]) == 2
    assert "cannot write no/such/folder.plan" in capsys.readouterr().err
