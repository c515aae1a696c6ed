"""`resihp show` as SVG, trace and JSON, as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from plan_build import make_plan

from resihp.cli import main
from resihp.ir.drawing.document import Document
from resihp.ir.explanation import example_of
from resihp.ir.model import GroupName
from resihp.ir.printer import print_plan

REPOSITORY = Path(__file__).parents[2]
PICTURES = re.compile(r"^\t\$\(BIN\)/resihp (show docs/pictures/.*)$", flags=re.MULTILINE)
COMMANDS = PICTURES.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8"))


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "job.plan"
    path.write_text(print_plan(make_plan(dp=2, tp=2, degrees={GroupName(1, 0): 1})))
    return str(path)


def shown(capsys, *arguments):
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def document(capsys, *arguments):
    return msgspec.json.decode(shown(capsys, "--format", "json", *arguments), type=Document)


def test_times_are_predicted_for_the_smallest_cluster_that_holds_the_job(capsys, plan):
    """In seconds; the note says what for. `--unit` counts units instead."""
    found = document(capsys, plan)
    assert (found.unit, found.times) == ("s", "predicted for cpu-box, fp32")
    assert found.capacity_bytes == 2 << 30
    assert 0 < found.iteration < 1
    in_units = document(capsys, plan, "--unit")
    assert in_units.unit == "unit"
    assert in_units.iteration == 15
    assert in_units.capacity_bytes is None


def test_a_slow_rank_is_slow_in_the_picture(capsys, plan):
    """Its group takes longer, and says so; the others are as fast as before."""
    before, after = document(capsys, plan), document(capsys, plan, "--slow", "rank=1:0.5")
    assert after.iteration > before.iteration
    groups = {group.group: group for replica in after.replicas for group in replica.groups}
    assert {name: group.speed for name, group in groups.items() if group.speed < 1} == {
        "dp0.pp0": 0.5
    }
    assert "0.5× speed" in shown(capsys, plan, "--format", "svg", "--slow", "rank=1:0.5")


def test_pictures_are_written_to_files(capsys, plan, tmp_path):
    """As they are printed."""
    for format_ in ("svg", "trace", "json"):
        target = tmp_path / f"picture.{format_}"
        assert shown(capsys, plan, "--format", format_, "-o", str(target)) == ""
        assert target.read_text(encoding="utf-8") == shown(capsys, plan, "--format", format_)
    ET.parse(tmp_path / "picture.svg")
    assert json.loads((tmp_path / "picture.trace").read_text())["displayTimeUnit"] == "ms"


def test_replicas_can_be_chosen(capsys, plan):
    """In every format."""
    assert [each.replica for each in document(capsys, plan, "--replicas", "1").replicas] == [1]
    assert [each.replica for each in document(capsys, plan, "--replicas", "0..1").replicas] == [
        0,
        1,
    ]
    text = shown(capsys, plan, "--replicas", "1")
    assert "dp1.pp0" in text and "dp0.pp0" not in text


@pytest.mark.parametrize("words", ["2", "1..9", "x", "1,,2", "-1", "3..1", "0..999999999999"])
def test_replicas_that_are_none_are_wrong_use(capsys, plan, words):
    """What is there is said."""
    for format_ in ("svg", "text"):
        assert main(["show", plan, "--format", format_, f"--replicas={words}"]) == 2
        assert f"--replicas {words}" in capsys.readouterr().err


def test_a_plan_with_errors_is_drawn_in_units(capsys, tmp_path):
    """The picture says why; nothing is told of its memory."""
    for code in ("RHP501", "RHP204", "RHP301", "RHP401"):
        path = tmp_path / f"{code}.plan"
        path.write_text(example_of(code).bad)
        found = document(capsys, str(path))
        assert found.unit == "unit"
        assert found.times.endswith("the plan has errors, see `resihp verify`")
        assert all(group.memory is None for each in found.replicas for group in each.groups)


def test_a_job_that_no_preset_holds_is_drawn_in_units(capsys, tmp_path):
    """Unless a cluster is named that does not hold it either."""
    path = tmp_path / "huge.plan"
    path.write_text(print_plan(make_plan(memory_bytes=1 << 50)))
    assert "no preset holds the job" in document(capsys, str(path)).times
    assert main(["show", str(path), "--cluster", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_state_of_health_that_cannot_be_is_refused(capsys, plan):
    """The job has no such rank."""
    assert main(["show", plan, "--slow", "rank=99:0.5"]) == 2
    assert "--slow rank=99:0.5: the job has ranks 0.." in capsys.readouterr().err


def test_the_text_has_a_table_of_predictions(capsys, plan):
    """Below the rows, which stay in units and have no idle shares; none with `--unit`."""
    text = shown(capsys, plan, "--slow", "rank=1:0.5")
    bare = shown(capsys, plan, "--unit")
    rows, table = text.split("\npredicted for ")
    assert "%" not in rows
    assert [line.split()[0] for line in rows.splitlines() if line] == [
        line.replace("  idle", "").split()[0] for line in bare.splitlines() if line
    ]
    lines = ["", *f"predicted for {table}".splitlines()]
    assert lines[1].startswith("predicted for cpu-box, fp32: ")
    assert lines[2].split() == ["speed", "busy", "idle", "memory", "of", "a", "rank"]
    assert [line.split()[0] for line in lines[3:]] == ["dp0.pp0", "dp0.pp1", "dp1.pp0", "dp1.pp1"]
    assert lines[3].split()[1] == "0.5" and lines[3].endswith(" of 2 GiB")


def test_units_of_time_and_a_cluster_exclude_each_other(capsys, plan):
    """Rather than that one of them is overlooked."""
    for more in (["--cluster", "cpu-box"], ["--slow", "rank=0:0.5"], ["--contention"]):
        assert main(["show", plan, "--unit", *more]) == 2
        assert more[0] in capsys.readouterr().err


def test_transfers_may_share_links(capsys, plan):
    """Which the note says; nothing gets faster."""
    alone, shared = document(capsys, plan), document(capsys, plan, "--contention")
    assert shared.iteration >= alone.iteration
    assert shared.times == f"{alone.times}, links shared"


def test_a_csv_is_drawn_in_units(capsys, tmp_path):
    """It names no model that could be priced."""
    path = tmp_path / "orders.csv"
    path.write_text("0F0,0F1,0B0,0B1\n")
    assert "names no model" in document(capsys, str(path)).times


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("/")[-1])
def test_the_pictures_of_the_docs_are_those_of_their_commands(command, tmp_path, monkeypatch):
    """`make pictures` draws them again."""
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command)
    committed, drawn = Path(words[-1]), tmp_path / "drawn.svg"
    assert main([*words[:-1], str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_the_docs_have_pictures():
    """Two at least, each shown on the page that explains them."""
    page = (REPOSITORY / "docs" / "plan-language.md").read_text(encoding="utf-8")
    names = [Path(shlex.split(command)[-1]).name for command in COMMANDS]
    assert len(names) >= 2
    assert all(f"(pictures/{name})" in page for name in names)
