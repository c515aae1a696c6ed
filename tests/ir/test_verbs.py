"""`resihp verify`, `fmt`, `show` and `expand` as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from plan_build import make_plan

from resihp.cli import main
from resihp.ir.model import GroupName
from resihp.ir.printer import print_plan


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.plan"
    path.write_text(print_plan(make_plan(dp=2, tp=2, degrees={GroupName(1, 0): 1})))
    return path


@pytest.fixture
def bad(tmp_path, good):
    path = tmp_path / "bad.plan"
    path.write_text(good.read_text().replace("  scatter_act 2\n", ""))
    return path


def test_verify_of_good_plans_is_quiet_and_0(capsys, good):
    """One line per file."""
    assert main(["verify", str(good), str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: ok\n" * 2


def test_verify_of_a_bad_plan_shows_the_place_and_is_1(capsys, bad):
    """Text with a caret, then the count."""
    assert main(["verify", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "error[RHP410]: `send_act 2` needs `scatter_act 2` before it" in out
    assert out.endswith(f"{bad}: 1 error\n")


def test_verify_writes_json(capsys, bad):
    """The same findings for programs."""
    assert main(["verify", "--format", "json", str(bad)]) == 1
    (document,) = json.loads(capsys.readouterr().out)
    (finding,) = document["diagnostics"]
    assert document["path"] == str(bad)
    assert finding["code"] == "RHP410"
    assert finding["span"] == {"line": finding["span"]["line"], "column": 3, "end_column": 13}


def test_verify_of_what_is_no_plan_is_1(capsys, tmp_path):
    """Syntax faults are findings like others."""
    path = tmp_path / "no.plan"
    path.write_text("plan 1\nnonsense\n")
    assert main(["verify", str(path)]) == 1
    assert "error[RHP001]: unknown statement `nonsense`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "FILE"],
        ["fmt", "FILE"],
        ["show", "FILE"],
        ["expand", "--rank", "0", "FILE"],
        ["diff", "FILE", "FILE"],
    ],
    ids=lambda argv: argv[0],
)
def test_an_unreadable_file_is_2(capsys, tmp_path, argv):
    """A missing file and one that is no text."""
    path = tmp_path / "some.plan"
    argv = [str(path) if word == "FILE" else word for word in argv]
    assert main(argv) == 2
    assert "cannot read" in capsys.readouterr().err
    path.write_bytes(b"plan 1\n\xff\xfe")
    assert main(argv) == 2
    assert "is not UTF-8 text (byte 7)" in capsys.readouterr().err


def test_an_unknown_transport_is_2(capsys, good):
    """The known ones are listed."""
    assert main(["verify", "--transport", "pigeon", str(good)]) == 2
    assert "the verifier knows `edge`" in capsys.readouterr().err


def test_verify_checks_memory_where_the_plan_has_a_capacity(capsys, tmp_path):
    """The sizes come from the model line."""
    path = tmp_path / "small.plan"
    path.write_text(print_plan(make_plan(memory_bytes=1 << 20)))
    assert main(["verify", str(path)]) == 1
    assert "error[RHP602]" in capsys.readouterr().out
    path.write_text(print_plan(make_plan(memory_bytes=1 << 30)))
    assert main(["verify", str(path)]) == 0


def test_verify_checks_the_reconfiguration_against_the_previous_plan(capsys, tmp_path, good):
    """A group that shrank without a source is found only with --previous."""
    before = tmp_path / "before.plan"
    before.write_text(print_plan(make_plan(dp=2, tp=2)))
    assert main(["verify", "--previous", str(before), str(good)]) == 1
    assert "error[RHP801]: rank 4 of dp1.pp0 lacks state" in capsys.readouterr().out
    assert main(["verify", str(good)]) == 0


def test_verify_reads_stdin_without_torch_or_numpy(good):
    """`-` is the standard input, and a cold start stays light."""
    code = (
        "import sys\nfrom resihp.cli import main\nstatus = main(['verify', '-'])\n"
        "assert not {'torch', 'numpy', 'asyncio'} & sys.modules.keys()\nsys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=good.read_bytes(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"<stdin>: ok\n")


def test_fmt_prints_checks_writes_and_diffs(capsys, good):
    """The four ways, on a file with one blank too many."""
    tidy = good.read_text()
    ragged = tidy.replace("  F 0", "   F  0  # first", 1)
    good.write_text(ragged)
    expected = tidy.replace("  F 0", "  F 0  # first", 1)
    assert main(["fmt", str(good)]) == 0
    assert capsys.readouterr().out == expected
    assert main(["fmt", "--check", str(good)]) == 1
    assert capsys.readouterr().out == f"{good}: would change\n"
    assert main(["fmt", "--diff", str(good)]) == 1
    assert "-   F  0  # first\n+  F 0  # first\n" in capsys.readouterr().out
    assert good.read_text() == ragged
    assert main(["fmt", "-w", str(good)]) == 0
    assert good.read_text() == expected
    assert main(["fmt", "--check", str(good)]) == 0


def test_fmt_leaves_what_is_no_plan_alone(capsys, tmp_path):
    """Nothing is written, the fault is shown."""
    path = tmp_path / "no.plan"
    path.write_text("plan 1\nnonsense\n")
    assert main(["fmt", "-w", str(path)]) == 1
    assert path.read_text() == "plan 1\nnonsense\n"
    assert "RHP001" in capsys.readouterr().err


def test_show_draws_the_plan(capsys, good):
    """A picture with a row per group."""
    assert main(["show", str(good)]) == 0
    assert "dp1.pp0 tp=1" in capsys.readouterr().out


def test_expand_prints_the_program_of_a_rank(capsys, good):
    """Homes, peers, chunks and tensor types; a rank without a program is wrong use."""
    assert main(["expand", "--rank", "4", str(good)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "program 1"
    assert lines[5:11] == [
        "rank 4 group=dp1.pp0 member=0 tp=1 layers=0..3 stages=0 of=2",
        "",
        "run {",
        "  F 0@1",
        "  scatter_act 0@1",
        "  send_act 0@1 -> 6:0/2,7:1/2 8x64xf32",
    ]
    assert lines[-4:] == ["  reduce_grads", "  step", "}", ""]
    assert main(["expand", "--rank", "5", str(good)]) == 2
    assert "rank 5 is in no group" in capsys.readouterr().err


def test_expand_notes_what_the_text_leaves_to_the_reader(capsys, good):
    """Chunks and bytes as comments, aligned as `fmt` aligns them."""
    assert main(["expand", "--rank", "4", "--verbose", str(good)]) == 0
    text = capsys.readouterr().out
    send = "  send_act 0@1 -> 6:0/2,7:1/2 8x64xf32"
    assert f"{'  scatter_act 0@1':<{len(send)}}  # 2 chunks\n{send}  # 2 x 2048 bytes\n" in text
    assert main(["expand", "--rank", "4", str(good)]) == 0
    bare = [line.partition("#")[0].rstrip() for line in text.split("\n")]
    assert capsys.readouterr().out.split("\n") == bare


def test_expand_prints_all_programs(capsys, good):
    """One after the other, as other verbs read them."""
    assert main(["expand", str(good)]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^rank (\d+)", text, flags=re.MULTILINE) == list("0123467")
    assert main(["expand", "--format", "json", str(good)]) == 0
    assert [one["rank"] for one in json.loads(capsys.readouterr().out)] == [0, 1, 2, 3, 4, 6, 7]


def test_expand_writes_json(capsys, good):
    """The same for programs; what an instruction does not have is left out."""
    assert main(["expand", "--rank", "6", "--format", "json", str(good)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["rank"], listed["group"], listed["layers"]) == (6, "dp1.pp1", [[4, 7]])
    assert listed["boundary_bytes"] == 16 * 64 * 4
    of_stage_1 = {"stage": 1, "home": 1, "microbatch": 0}
    transfer = {"peer": 4, "chunk": 0, "num_chunks": 2, "num_bytes": 2048}
    assert listed["instrs"][:2] == [
        {"index": 0, "op": "recv_act", **of_stage_1, "transfers": [transfer]},
        {"index": 1, "op": "gather_act", **of_stage_1, "num_chunks": 2},
    ]
    assert listed["instrs"][-1]["op"] == "step"


def test_expand_of_what_is_no_plan_shows_the_fault(capsys, tmp_path):
    """Like the other verbs."""
    path = tmp_path / "no.plan"
    path.write_text("plan 1\nnonsense\n")
    assert main(["expand", "--rank", "0", str(path)]) == 1
    assert "RHP001" in capsys.readouterr().err
