"""The formats of `resihp verify` that other programs read."""

from __future__ import annotations

import json
import os
import re

import pytest

import resihp
from resihp.cli import main
from resihp.ir.codes import CODES
from resihp.ir.diagnostics import Diagnostic, FileFindings, Related, Severity, Span
from resihp.ir.explanation import example_of
from resihp.ir.fingerprint import fingerprints
from resihp.ir.output_github import render_github
from resihp.ir.output_sarif import render_sarif
from resihp.ir.parser import parse
from resihp.ir.verify import verify

COMMAND = re.compile(r"::(error|warning) ([^:]*)::([^\n]*)")


def unescape(text):
    """What the runner of GitHub Actions makes of a property or a message."""
    for escape, char in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(escape, char)
    return text


def read_command(line):
    """(kind, properties, message) as the runner reads a command."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    properties = dict(word.split("=", 1) for word in found[2].split(","))
    return found[1], {key: unescape(value) for key, value in properties.items()}, unescape(found[3])


def one(**changes):
    """A file with one finding."""
    fields = {"code": "RHP412", "message": "it is so", "span": Span(2, 3, 7), **changes}
    finding = Diagnostic(**fields)
    return FileFindings(path="a.plan", text="one\n  two two\nthree\n", diagnostics=(finding,))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a bad and a good plan."""
    example = example_of("RHP412")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a b.plan").write_text(example.bad)
    (tmp_path / "good.plan").write_text(example.good)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_finding_is_a_workflow_command_at_its_place(capsys, folder):
    """File, line, columns, title; notes in the message; then a line per file for the log."""
    assert main(["verify", "--format", "github", "plans/a b.plan", "good.plan"]) == 1
    command, *rest = capsys.readouterr().out.splitlines()
    kind, properties, message = read_command(command)
    assert (kind, rest) == ("error", ["resihp: plans/a b.plan: 1 error", "resihp: good.plan: ok"])
    assert properties == {
        "file": "plans/a b.plan",
        "line": "24",
        "endLine": "24",
        "col": "3",
        "endColumn": "13",
        "title": "RHP412 channel order differs",
    }
    assert message.splitlines()[1] == "plans/a b.plan:12:3: `send_act 0` is here"


def test_everything_that_would_end_a_command_is_escaped():
    """Line breaks, percent signs, and colons and commas of properties survive."""
    message, path = "50% :: a,b\r\nnext %0A", "odd,name:%.plan"
    findings = one(message=message, hint="try, this")
    text = render_github([FileFindings(path=path, text="\n", diagnostics=findings.diagnostics)])
    kind, properties, said = read_command(text.splitlines()[0])
    assert (kind, properties["file"]) == ("error", path)
    assert said == f"{message}\nhint: try, this"


def test_a_warning_is_a_warning():
    """In both formats."""
    file = one(severity=Severity.WARNING)
    assert render_github([file]).startswith("::warning file=a.plan,line=2,")
    (run,) = json.loads(render_sarif([file], version="1.0.0"))["runs"]
    assert run["results"][0]["level"] == "warning"


def test_sarif_has_rules_places_and_related_places(capsys, folder):
    """Everything that a code scanner shows."""
    assert main(["verify", "--format", "sarif", "plans/a b.plan", str(folder / "good.plan")]) == 1
    log = json.loads(capsys.readouterr().out)
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (log["version"], run["columnKind"]) == ("2.1.0", "unicodeCodePoints")
    assert (driver["name"], driver["semanticVersion"]) == ("resihp", resihp.__version__)
    (rule,) = driver["rules"]
    assert (rule["id"], rule["name"]) == ("RHP412", "ChannelOrderDiffers")
    assert rule["fullDescription"]["text"] == CODES["RHP412"].explanation
    assert CODES["RHP412"].consequence in rule["help"]["text"]
    uris = [artifact["location"]["uri"] for artifact in run["artifacts"]]
    assert uris == ["plans/a%20b.plan", "good.plan"]
    (result,) = run["results"]
    assert (result["ruleId"], result["ruleIndex"], result["level"]) == ("RHP412", 0, "error")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "plans/a%20b.plan", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {
        "startLine": 24,
        "startColumn": 3,
        "endColumn": 13,
        "snippet": {"text": "  recv_act 1"},
    }
    related = result["relatedLocations"]
    assert [item["id"] for item in related] == [1, 2, 3]
    assert related[0]["message"]["text"] == "`send_act 0` is here"
    assert related[0]["physicalLocation"]["region"]["startLine"] == 12


def test_sarif_without_findings_has_no_results(capsys, folder):
    """Exit status 0, and an empty list rather than none: the scan did run."""
    assert main(["verify", "--format", "sarif", "good.plan"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["results"] == []
    assert run["tool"]["driver"]["rules"] == []


def test_a_file_elsewhere_is_an_absolute_uri(capsys, folder, monkeypatch):
    """Nothing else would find it again."""
    monkeypatch.chdir(folder / "plans")
    assert main(["verify", "--format", "sarif", "../good.plan"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    uri = (folder / "good.plan").as_uri()
    assert run["artifacts"] == [{"location": {"uri": uri}}]


def test_braces_in_a_sarif_message_are_doubled():
    """A single one would be taken for a placeholder."""
    related = (Related("the `{` here", Span(1, 1, 2)),)
    file = one(message="`}` closes no block", related=related, hint="a `{`")
    (run,) = json.loads(render_sarif([file], version="1.0.0"))["runs"]
    (result,) = run["results"]
    assert result["message"]["text"] == "`}}` closes no block\nHint: a `{{`"
    assert result["relatedLocations"][0]["message"]["text"] == "the `{{` here"


def prints(text):
    """The fingerprints of all findings of a plan."""
    return fingerprints(verify(parse(text)), text)


def test_a_fingerprint_survives_edits_elsewhere():
    """Comments, blank lines, spacing and other instructions move lines, not identities."""
    text = example_of("RHP412").bad
    moved = text.replace("plan 1\n", "plan 1\n\n# about this plan\n\n").replace(
        "  recv_act 1\n", "    recv_act   1   # too early\n", 1
    )
    assert moved != text
    assert prints(moved) == prints(text)


def test_a_fingerprint_tells_findings_apart():
    """By code, stream and instruction; equal ones by their order."""
    text = example_of("RHP302").bad.replace("  BW 0\n", "  F 0\n  F 0\n  BW 0\n", 1)
    found = prints(text)
    assert len(set(found)) == len(found) == 3
    assert [mark.partition(":")[2] for mark in found] == ["1", "2", "3"]
    plans = [code for code in CODES if code[3] in "1234" and code[3:5] != "42"]
    everywhere = [prints(example_of(code).bad)[0] for code in plans]
    assert len(set(everywhere)) == len(everywhere)


def test_text_that_is_no_plan_is_reported_in_every_format(capsys, folder):
    """Syntax faults are findings like others."""
    (folder / "no.plan").write_text("plan 1\nnonsense {\n  F 0\n")
    for form in ("text", "json", "github", "sarif"):
        assert main(["verify", "--format", form, "no.plan", "good.plan"]) == 1
        out = capsys.readouterr().out
        assert "RHP001" in out
        assert "good.plan" in out


def test_the_same_file_twice_is_two_entries(capsys, folder):
    """One per word of the command line."""
    assert main(["verify", "--format", "json", "good.plan", "good.plan"]) == 0
    assert [entry["path"] for entry in json.loads(capsys.readouterr().out)] == ["good.plan"] * 2
    assert os.getcwd() == str(folder)
