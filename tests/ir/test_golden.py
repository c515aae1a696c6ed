"""Diagnostics to the letter: a folder of bad plans beside the exact text that they produce."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.cli.csv_files import in_cells, is_csv
from resihp.cli.plan_files import parse_file
from resihp.cli.program_files import verify_program_files
from resihp.compiler.facts import facts_of
from resihp.errors import PlanSyntaxError
from resihp.ir.codes import CODES
from resihp.ir.explanation import example_of
from resihp.ir.lint import lint
from resihp.ir.parser import parse
from resihp.ir.render import render_text
from resihp.ir.verify import verify

FOLDER = Path(__file__).parent / "golden"
PLANS = {
    path.stem: path
    for path in sorted([*FOLDER.glob("*.plan"), *FOLDER.glob("*.csv")])
    if ".previous" not in path.name
}


def rendered(text, previous, path):
    """What `resihp verify` prints about a plan, with `--lint` for the example of a warning."""
    if path.endswith(".program"):
        (file,) = verify_program_files([(path, text)], None)
        return render_text(file.diagnostics, text, path)
    before = None if previous is None else parse(previous).plan
    try:
        parsed = parse_file(text, path)
        findings = verify(parsed, previous=before, facts=facts_of)
        if path.startswith("RHP9"):
            findings += lint(parsed)
        if is_csv(path):
            findings = in_cells(findings, parsed)
    except PlanSyntaxError as error:
        findings = error.diagnostics
    return render_text(findings, text, path)


def check(name, found, request):
    """Compare with, or write, `golden/NAME.txt`."""
    expected = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        expected.write_text(found, encoding="utf-8")
    assert found == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*CODES, *PLANS])
def test_the_diagnostics_read_as_agreed(name, request):
    """Places, carets, notes and hints of the examples and of plans with several faults.

    After a change that is meant: `pytest tests/ir/test_golden.py --update-golden`, then read the
    diff of tests/ir/golden like any other.
    """
    if name in CODES:
        example = example_of(name)
        found = rendered(example.bad, example.previous, example.file("bad"))
    else:
        path = PLANS[name]
        before = path.with_suffix(".previous.plan")
        previous = before.read_text(encoding="utf-8") if before.exists() else None
        found = rendered(path.read_text(encoding="utf-8"), previous, path.name)
    assert found
    check(name, found, request)


def test_nothing_in_the_folder_is_left_over():
    """Each text belongs to a plan."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*CODES, *PLANS}
