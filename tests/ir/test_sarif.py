"""Every SARIF document keeps to the standard: its objects, as far as ours have them, in a table.

The table says of each object of SARIF 2.1.0 (OASIS) which properties may be there, of what type,
which of them must be, and what a list of them must not have twice. Whatever is not in the table
is no property of the object, or one that we do not write. The documents were held against the
schema that OASIS publishes too, when the table was written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from resihp.cli import main
from resihp.ir.codes import CODES

FOLDER = Path(__file__).parents[2] / "resihp" / "ir" / "examples"
URI = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})+")

OBJECTS: dict[str, dict[str, str]] = {
    "log": {"$schema": "uri", "version!": "2.1.0", "runs!": "[run]"},
    "run": {
        "tool!": "tool",
        "columnKind": "utf16CodeUnits|unicodeCodePoints",
        "artifacts": "{artifact}",
        "results": "[result]",
    },
    "tool": {"driver!": "toolComponent"},
    "toolComponent": {"name!": "str", "semanticVersion": "str", "rules": "{reportingDescriptor}"},
    "reportingDescriptor": {
        "id!": "str",
        "name": "str",
        "shortDescription": "message",
        "fullDescription": "message",
        "help": "message",
    },
    "message": {"text!": "str"},
    "artifact": {"location": "artifactLocation"},
    "artifactLocation": {"uri": "uri", "uriBaseId": "str"},
    "artifactContent": {"text": "str"},
    "result": {
        "ruleId": "str",
        "ruleIndex": "int",
        "level": "none|note|warning|error",
        "message!": "message",
        "locations": "[location]",
        "relatedLocations": "{location}",
        "partialFingerprints": "strings",
    },
    "location": {"id": "int", "physicalLocation": "physicalLocation", "message": "message"},
    "physicalLocation": {"artifactLocation!": "artifactLocation", "region": "region"},
    "region": {
        "startLine": "count",
        "startColumn": "count",
        "endColumn": "count",
        "snippet": "artifactContent",
    },
}
"""`name!` must be there; `[x]` is a list, `{x}` one without repetitions, `a|b` one of the words."""


def faults(value, kind, where="log"):
    """What of `value` the standard does not allow."""
    if kind[0] in "[{":
        if not isinstance(value, list):
            return [f"{where} is no list"]
        found = [
            f for n, item in enumerate(value) for f in faults(item, kind[1:-1], f"{where}/{n}")
        ]
        once = len({json.dumps(item, sort_keys=True) for item in value}) == len(value)
        return found if once or kind[0] == "[" else [*found, f"{where} repeats an item"]
    if kind in OBJECTS:
        return object_faults(value, kind, where)
    right = {
        "str": lambda: isinstance(value, str),
        "uri": lambda: isinstance(value, str) and URI.fullmatch(value) is not None,
        "int": lambda: type(value) is int and value >= 0,
        "count": lambda: type(value) is int and value >= 1,
        "strings": lambda: all(isinstance(text, str) for text in value.values()),
    }.get(kind, lambda: value in kind.split("|"))
    return [] if right() else [f"{where} is {value!r}, not {kind}"]


def object_faults(value, kind, where):
    """The same for an object of the table."""
    if not isinstance(value, dict):
        return [f"{where} is no {kind}"]
    known = {key.rstrip("!"): inner for key, inner in OBJECTS[kind].items()}
    required = [key[:-1] for key in OBJECTS[kind] if key.endswith("!")]
    found = [f"{where} lacks {key}" for key in required if key not in value]
    for key, inner in value.items():
        if key not in known:
            found.append(f"{where}: {kind} has no {key}")
        else:
            found += faults(inner, known[key], f"{where}/{key}")
    return found


def document(capsys, *arguments):
    """What `resihp verify --format sarif` prints."""
    main(["verify", "--format", "sarif", *map(str, arguments)])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("area", sorted({code[:4] for code in CODES}))
def test_the_document_of_any_finding_keeps_to_the_standard(capsys, area):
    """All examples, bad and mended, with and without the plan before."""
    files = sorted(
        path
        for path in FOLDER.iterdir()
        if path.name.startswith(area) and path.suffix != ".program"
    )
    log = document(capsys, *(["--lint"] if area == "RHP9" else []), *files)
    assert faults(log, "log") == []
    (run,) = log["runs"]
    assert len(run["artifacts"]) == len(files)
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in run["results"])
    codes = [code for code in CODES if code.startswith(area) and not code.startswith("RHP42")]
    if not area.startswith("RHP8"):
        assert rules == codes


def test_notes_about_programs_name_the_file_that_they_are_about(capsys, tmp_path):
    """All programs of one command are one job, so a note may be in another file."""
    parts = (FOLDER / "RHP420.bad.program").read_text(encoding="utf-8").split("\n\nprogram")
    for rank, text in enumerate(("\nprogram".join(parts[:1]), "program" + parts[1])):
        (tmp_path / f"r{rank}.program").write_text(text, encoding="utf-8")
    log = document(capsys, tmp_path / "r0.program", tmp_path / "r1.program")
    assert faults(log, "log") == []
    (result,) = log["runs"][0]["results"]
    places = [place["physicalLocation"] for place in result["locations"]]
    places += [place["physicalLocation"] for place in result["relatedLocations"]]
    names = [place["artifactLocation"]["uri"].rpartition("/")[2] for place in places]
    assert names == ["r1.program", "r0.program"]
    assert places[1]["region"]["snippet"]["text"] == "  send_act 0@0 -> 1 16x32xf32"


def test_a_file_that_is_named_twice_is_one_artifact(capsys):
    """The standard forbids the same one twice; its findings are there twice."""
    file = FOLDER / "RHP412.bad.plan"
    log = document(capsys, file, file)
    assert faults(log, "log") == []
    (run,) = log["runs"]
    assert (len(run["artifacts"]), len(run["results"])) == (1, 2)


def test_odd_names_and_lines_are_still_uris_and_text(capsys, monkeypatch, tmp_path):
    """Spaces, brackets, percent signs, letters beyond ASCII; tabs in the line that is shown."""
    monkeypatch.chdir(tmp_path)
    name = "ä b[1]%7B#?.plan"
    Path(name).write_text("plan 1\n\tnonsense \u2028 {\n", encoding="utf-8")
    log = document(capsys, name)
    assert faults(log, "log") == []
    (artifact,) = log["runs"][0]["artifacts"]
    uri = urlsplit(artifact["location"]["uri"])
    assert (unquote(uri.path), uri.query, uri.fragment) == (name, "", "")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), "2.2.0"),
        (("runs", 0, "tool"), {}),
        (("runs", 0, "artifacts", 1), None),
        (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "ruleIndex"), True),
        (("runs", 0, "results", 0, "message"), "text"),
        (("runs", 0, "results", 0, "colour"), "red"),
        (
            ("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"),
            0,
        ),
        (
            ("runs", 0, "artifacts", 0, "location", "uri"),
            "a b.plan",
        ),
    ],
)
def test_the_table_would_find_a_fault(capsys, path, value):
    """A document with one thing wrong is refused."""
    log = document(capsys, FOLDER / "RHP412.bad.plan", FOLDER / "RHP412.good.plan")
    at = log
    for key in path[:-1]:
        at = at[key]
    if value is None:
        at[path[-1]] = at[0]
    else:
        at[path[-1]] = value
    assert faults(log, "log")
