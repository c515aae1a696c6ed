"""Every diagnostic code has an example that shows it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources

import pytest

from resihp.cli import main
from resihp.cli.plan_files import parse_file
from resihp.cli.program_files import verify_program_files
from resihp.compiler.facts import facts_of
from resihp.errors import PlanSyntaxError
from resihp.ir.codes import CODES
from resihp.ir.explanation import AREAS, change, example_of, file_of, list_codes
from resihp.ir.lint import lint
from resihp.ir.parser import parse
from resihp.ir.printer import format_text
from resihp.ir.program_text import parse_programs
from resihp.ir.verify import verify

FOLDER = resources.files("resihp.ir").joinpath("examples")


def codes_of(text, previous, *, code="", path=""):
    """The codes that `resihp verify` reports, with `--lint` if `code` is a warning."""
    before = None if previous is None else parse(previous).plan
    if path.endswith(".program"):
        (file,) = verify_program_files([(path, text)], None)
        return {finding.code for finding in file.diagnostics}
    try:
        parsed = parse_file(text, path)
    except PlanSyntaxError as error:
        return {finding.code for finding in error.diagnostics}
    findings = verify(parsed, previous=before, facts=facts_of)
    if code.startswith("RHP9"):
        findings += lint(parsed)
    return {finding.code for finding in findings}


def test_the_folder_holds_the_examples_of_all_codes_and_no_others():
    """A bad and a good plan each; a plan before only where codes are about two plans."""
    files = {file.name for file in FOLDER.iterdir()}
    pairs = {file_of(code, kind) for code in CODES for kind in ("bad", "good")}
    assert pairs <= files
    assert all(name.startswith("RHP8") for name in files - pairs)
    assert all(name.endswith(".previous.plan") for name in files - pairs)


@pytest.mark.parametrize("code", CODES)
def test_the_bad_example_has_exactly_its_code(code):
    """No companions: what is explained is what the reader sees."""
    example = example_of(code)
    assert codes_of(example.bad, example.previous, code=code, path=example.file("bad")) == {code}


@pytest.mark.parametrize("code", CODES)
def test_the_good_example_is_clean_and_canonical(code):
    """It verifies without findings, as does the plan before, and `fmt` leaves it alone."""
    example = example_of(code)
    assert codes_of(example.good, example.previous, code=code, path=example.file("good")) == set()
    if example.file("good").endswith(".plan"):
        assert format_text(parse(example.good)) == example.good
    if example.file("good").endswith(".program"):
        assert format_text(parse_programs(example.good)[0]) == example.good
    if example.previous is not None:
        assert codes_of(example.previous, None) == set()


@pytest.mark.parametrize("code", CODES)
def test_the_mended_example_changes_little(code):
    """The lines that mend it are few enough to see why."""
    lines = change(example_of(code)).splitlines()
    assert 1 <= sum(line.startswith(("+", "-")) for line in lines) <= 20


def test_every_code_belongs_to_an_area():
    """The list has each code once, in order."""
    listed = [line.split()[0] for line in list_codes().splitlines() if line.startswith("  ")]
    assert listed == sorted(CODES)
    assert {code[3] for code in CODES} == set(AREAS)


def test_explain_shows_meaning_example_findings_and_change(capsys):
    """All of it in one page; the code may be written in short."""
    assert main(["explain", "rhp412"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("RHP412: channel order differs\n\nA channel is all that one group")
    assert CODES["RHP412"].consequence.split(":")[0] in page
    assert "RHP412.bad.plan:24:3: error[RHP412]: `recv_act 1` would take" in page
    assert "    -  recv_act 0\n    -  F 0\n" in page
    assert main(["explain", "412"]) == 0
    assert capsys.readouterr().out == page


def test_explain_shows_the_plan_before(capsys):
    """Codes about two plans need both."""
    assert main(["explain", "RHP801", "RHP602"]) == 0
    page = capsys.readouterr().out
    assert "The plan before (RHP801.previous.plan):" in page
    assert "RHP602: state does not fit" in page


def test_explain_lists_and_refuses(capsys):
    """Without a code the list; an unknown code is answered with near ones."""
    assert main(["explain"]) == 0
    assert "  RHP501  deadlock\n" in capsys.readouterr().out
    assert main(["explain", "RHP509"]) == 2
    assert "RHP501" in capsys.readouterr().err
    assert main(["explain", "nonsense"]) == 2
    assert "unknown code `nonsense`" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["explain"], ["explain", "601"]])
def test_explain_stays_light(argv):
    """The list needs no grammar; a page needs neither torch nor numpy."""
    heavy = {"torch", "numpy", "asyncio"} | ({"lark"} if len(argv) == 1 else set())
    code = (
        "import sys\nfrom resihp.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )
    assert not heavy & set(done.stderr.split())
