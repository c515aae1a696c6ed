"""Plans as JSON: the same plan comes back, and what has no text is refused with its place."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from strategies import plans

from resihp.cli import main
from resihp.errors import PlanSyntaxError, UserError
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.plan_json import plan_of_json, print_json
from resihp.ir.printer import print_plan

PLAN = make_plan(pp=2, dp=2, tp=2, scatter=True)
TEXT = print_plan(PLAN)
DOCUMENT = json.loads(print_json(PLAN))


@given(plans)
@settings(max_examples=150, deadline=None)
def test_any_plan_comes_back_from_its_json(plan: Plan):
    """Right or wrong, plan or schedule, and printing it again gives the same."""
    text = print_json(plan)
    assert plan_of_json(text, "x.json") == plan
    assert print_json(plan_of_json(text.encode(), "x.json")) == text


def test_instructions_have_their_words_and_defaults_are_left_out():
    """Other programs need no table of numbers."""
    stream = DOCUMENT["streams"][0]
    assert stream["body"][:2] == [
        {"op": "F", "microbatch": 0},
        {"op": "scatter_act", "microbatch": 0},
    ]
    assert not {"resume", "lost", "transport", "precision"} & DOCUMENT.keys()


def edited(*path, value):
    """The document with another value somewhere."""
    document = copy.deepcopy(DOCUMENT)
    here = document
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no plan in JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("[" * 100_000, "no plan in JSON"),
        ('{"a":' * 100_000, "no plan in JSON"),
        (edited("level", value="program"), r"`\$.level`"),
        (edited("version", value=2), r"`\$.version`"),
        (edited("colour", value=2), "unknown field `colour`"),
        (edited("model", "layers", value="8"), r"`\$.model.layers`"),
        (edited("model", "name", value="a b"), "model.name: 'a b' is no name"),
        (edited("schedule", value="1f1b\nlost 3"), "schedule: '1f1b.nlost 3' is no name"),
        (edited("transport", value="edge\nlost 3"), "transport: unknown transport"),
        (edited("precision", value="fp8"), "'fp8'"),
        (edited("groups", 1, "ranks", value=[]), r"groups\[1\].ranks: the list is empty"),
        (edited("streams", 1, "replicas", value=[]), r"streams\[1\].replicas: the list is empty"),
        (
            edited("streams", 1, "body", 2, value={"op": "recv_atc", "microbatch": 0}),
            r"streams\[1\].body\[2\]: unknown instruction 'recv_atc'; did you mean `recv_act`",
        ),
        (edited("streams", 0, "body", 0, value={"op": "F"}), "`F` needs a microbatch"),
        (
            edited("streams", 0, "body", 0, value={"op": "F", "microbatch": 0, "peer": 1}),
            "`F` has no peer",
        ),
        (
            edited("streams", 0, "body", 0, value={"op": "step", "stage": 1}),
            "`step` has no stage",
        ),
        (
            edited("streams", 0, "body", 0, value={"op": "F", "microbatch": 0, "paired": True}),
            "a pair has two of",
        ),
        (
            edited("reconfigure", value=[{"type": "Steal", "layers": [0, 1]}]),
            "'Steal'",
        ),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(text, message):
    """In words, whatever it is."""
    with pytest.raises(UserError, match=message):
        plan_of_json(text, "x.json")


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def _paths(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 3)):
            yield from _paths(value[key], (*path, key))


PATHS = [path for path in _paths(DOCUMENT) if path]


@given(st.sampled_from(PATHS), junk)
@settings(max_examples=200, deadline=None)
def test_what_is_read_can_be_written_as_text_or_has_faults_with_lines(path, value):
    """Never a traceback, whatever stands where."""
    text = edited(*path, value=value)
    try:
        plan = plan_of_json(text, "x.json")
    except UserError:
        return
    with contextlib.suppress(PlanSyntaxError):
        assert parse(print_plan(plan)).plan == plan


def test_verbs_take_and_give_json(tmp_path, capsys, monkeypatch):
    """By the name of the file, from the standard input and with --format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.plan").write_text(TEXT)
    assert main(["fmt", "--format", "json", "x.plan"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "x.json").write_text(text)
    assert main(["fmt", "x.json"]) == 0
    assert capsys.readouterr().out == TEXT
    assert main(["verify", "x.json"]) == 0
    assert main(["show", "x.json"]) == 0
    assert main(["diff", "x.plan", "x.json"]) == 0


def test_findings_about_json_show_the_lines_of_its_text(tmp_path, capsys):
    """As `resihp fmt` prints it."""
    file = tmp_path / "x.json"
    file.write_text(edited("streams", 0, "body", 0, value={"op": "F", "microbatch": 99}))
    assert main(["verify", str(file)]) == 1
    assert "  F 99\n" in capsys.readouterr().out


def test_formatting_in_place_is_for_text(tmp_path, capsys):
    """JSON is left alone."""
    file = tmp_path / "x.json"
    file.write_text(print_json(PLAN))
    assert main(["fmt", "-w", str(file)]) == 2
    assert "is JSON, which has no formatting" in capsys.readouterr().err
    assert file.read_text() == print_json(PLAN)


def test_a_schedule_in_json_is_lowered_to_a_plan_in_json(tmp_path):
    """The name of the output says the form."""
    schedule = "schedule 1\n" + "\n".join(
        line
        for line in TEXT.split("\n")[1:]
        if not line.startswith(("  send", "  recv", "  scatter", "  gather", "  reduce", "  step"))
    )
    source, target = tmp_path / "s.json", tmp_path / "p.json"
    source.write_text(print_json(parse(schedule).plan))
    assert main(["lower", str(source), "-o", str(target)]) == 0
    assert plan_of_json(target.read_bytes(), "p.json").level == "plan"
