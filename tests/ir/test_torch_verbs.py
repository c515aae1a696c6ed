"""torch's CSV on the command line: verify, import, export, and the other verbs that read plans."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from resihp.cli import main
from resihp.ir.parser import parse
from resihp.ir.torch_csv import read_torch_csv

GOOD = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD\r\n"
)
SWAPPED = GOOD.replace("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0")
OLD = GOOD.replace("B1,0R", "BW1,0R").replace("0B0", "0BW0").replace("1B", "1BW")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a good, a wrong and an old file."""
    for name, text in (("good", GOOD), ("swapped", SWAPPED), ("old", OLD)):
        (tmp_path / f"{name}.csv").write_bytes(text.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *argv, status=0):
    """What a command prints to stdout; its status is checked."""
    assert main(list(argv)) == status
    return capsys.readouterr().out


def test_a_csv_is_verified_where_it_stands(capsys, folder):
    """The place, then the row and cell."""
    assert said(capsys, "verify", "good.csv") == "good.csv: ok\n"
    out = said(capsys, "verify", "swapped.csv", status=1)
    assert out.startswith("swapped.csv:2:1: error[RHP412]: `recv_act 1` would take")
    assert "(row 1, cell 0: `1RECV_F1`)\n" in out


def test_programs_get_the_place_of_the_cell_too(capsys, folder):
    """As JSON; the message names the cell."""
    out = said(capsys, "verify", "--format", "json", "swapped.csv", status=1)
    ((found,),) = [entry["diagnostics"] for entry in json.loads(out)]
    assert found["span"] == {"line": 2, "column": 1, "end_column": 9}
    assert found["message"].endswith("(row 1, cell 0: `1RECV_F1`)")


@pytest.mark.parametrize("form", ["github", "sarif"])
def test_a_csv_is_reported_in_every_format(capsys, folder, form):
    """Its rows are lines of a text."""
    assert "RHP412" in said(capsys, "verify", "--format", form, "swapped.csv", status=1)


def test_a_finding_of_a_csv_stays_the_same_one_when_other_cells_change(capsys, folder):
    """Its cell is what identifies it."""
    marks: list[object] = []
    for text in (SWAPPED, SWAPPED.replace("1B1,1SEND_B1", "1I1,1SEND_B1,1W1")):
        (folder / "swapped.csv").write_text(text)
        log = json.loads(said(capsys, "verify", "--format", "sarif", "swapped.csv", status=1))
        marks.append([result["partialFingerprints"] for result in log["runs"][0]["results"]])
    assert marks[0] == marks[1] != []


def test_the_old_vocabulary_must_be_asked_for(capsys, folder):
    """By `verify`, `import` and `export` alike."""
    assert "RHP011" in said(capsys, "verify", "old.csv", status=1)
    assert said(capsys, "verify", "--vocabulary", "2024", "old.csv") == "old.csv: ok\n"
    assert main(["import", "old.csv"]) == 1
    assert "RHP011" in capsys.readouterr().err
    assert said(capsys, "export", "--torch", "comms", "--vocabulary", "2024", "old.csv") == GOOD


def test_import_writes_a_plan_and_export_writes_it_back(capsys, folder):
    """To the byte, with files or with pipes."""
    assert said(capsys, "import", "good.csv", "-o", "good.plan") == ""
    plan = parse((folder / "good.plan").read_text()).plan
    assert plan == read_torch_csv(GOOD, path="good.csv").plan
    assert said(capsys, "verify", "good.plan") == "good.plan: ok\n"
    assert said(capsys, "export", "--torch", "comms", "good.plan", "-o", "again.csv") == ""
    assert (folder / "again.csv").read_bytes().decode() == GOOD
    assert said(capsys, "import", "good.csv") == (folder / "good.plan").read_text()
    assert said(capsys, "export", "--torch", "compute", "good.plan") == (
        "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n"
    )


def test_what_cannot_be_written_is_a_wrong_use(capsys, folder):
    """The message names it, and a place that cannot be written to."""
    main(["import", "good.csv", "-o", "good.plan"])
    text = (folder / "good.plan").read_text()
    (folder / "memory.plan").write_text(text.replace("\n\n", "\nmemory 1GiB\n\n", 1))
    assert main(["export", "--torch", "comms", "memory.plan"]) == 2
    assert "the `memory` line" in capsys.readouterr().err
    assert main(["export", "--torch", "comms", "good.plan", "-o", "no/such.csv"]) == 2
    assert "cannot write no/such.csv" in capsys.readouterr().err


def test_a_plan_that_cannot_be_read_is_not_exported(capsys, folder):
    """Its faults are shown."""
    (folder / "no.plan").write_text("nonsense\n")
    assert main(["export", "--torch", "comms", "no.plan"]) == 1
    assert "RHP002" in capsys.readouterr().err


def test_standard_input_is_csv_when_its_kind_is_given(capsys, folder, monkeypatch):
    """It has no name that would tell; `import` reads nothing else."""
    for argv in (["verify", "--kind", "comms", "-"], ["import", "-"]):
        stdin = io.TextIOWrapper(io.BytesIO(GOOD.encode()))
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(argv) == 0
    assert "<stdin>: ok\n" in capsys.readouterr().out


def test_the_number_of_micro_batches_may_be_given(capsys, folder):
    """A file that lacks the last one everywhere looks complete without."""
    assert "RHP301" in said(capsys, "verify", "--microbatches", "3", "good.csv", status=1)
    assert main(["verify", "--microbatches", "0", "good.csv"]) == 2
    assert "a step has at least 1" in capsys.readouterr().err


def test_other_verbs_read_it_too(capsys, folder):
    """As the plan that it is; only `fmt` has nothing to do."""
    assert "F0 F1" in said(capsys, "show", "good.csv")
    assert "send_act 0" in said(capsys, "expand", "--rank", "0", "good.csv")
    assert "in another order" in said(capsys, "diff", "good.csv", "swapped.csv", status=1)
    (folder / "order.csv").write_text("0F0,0B0\n1F0,1F0,1B0\n")
    assert main(["lower", "order.csv"]) == 1
    assert "(row 1, cell 1: `1F0`)" in capsys.readouterr().err
    assert main(["fmt", "good.csv"]) == 2
    assert "`resihp import` makes a plan of it" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["verify", "good.csv"], ["import", "good.csv"]])
def test_a_csv_is_read_without_anything_heavy(folder, argv):
    """Neither torch nor numpy."""
    code = (
        "import sys\nfrom resihp.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )
    assert not {"torch", "asyncio"} & set(done.stderr.split())
