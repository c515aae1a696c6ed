"""`docs/plan-language.md` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from resihp.cli import VERBS, main
from resihp.ir.codes import CODES
from resihp.ir.explanation import file_of
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.ir.printer import format_text
from resihp.ir.statements import KEYWORDS
from resihp.ir.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "plan-language.md").read_text(encoding="utf-8")


def test_the_table_of_codes_is_that_of_the_program():
    """Every code with its title, meaning and examples, no other, in order."""
    rows = re.findall(r"^\| `(RHP\d+)` \| (.*) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    folder = "../resihp/ir/examples"
    assert rows == [
        (
            code,
            known.title,
            known.explanation,
            f"[bad]({folder}/{file_of(code, 'bad')}), [mended]({folder}/{file_of(code, 'good')})",
        )
        for code, known in CODES.items()
    ]


def test_every_verb_on_plans_has_its_section():
    """Light verbs work on plans, but for `compare`, which looks at runs."""
    sections = re.findall(r"^## `resihp (\w+)`$", PAGE, flags=re.MULTILINE)
    on_plans = {name for name, verb in VERBS.items() if verb.light} - {"compare", "explain"}
    assert set(sections) == on_plans
    assert "$ resihp explain" in PAGE


def test_the_outputs_on_the_page_are_those_of_the_program(capsys, monkeypatch, tmp_path):
    """`expand` and `diff` of the example, against the healthy plan before it."""
    (example,) = re.findall(r"```plan\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "degraded.plan").write_text(example)
    (tmp_path / "healthy.plan").write_text(healthy(example))
    monkeypatch.chdir(tmp_path)
    for command in ("expand --rank 4 degraded.plan", "diff healthy.plan degraded.plan"):
        (shown,) = re.findall(rf"```\n\$ resihp {command}\n(.*?)```", PAGE, flags=re.DOTALL)
        main(command.split())
        assert capsys.readouterr().out == shown


def healthy(example):
    """The plan that ran before the example: nobody lost, both replicas alike."""
    head, streams = example.split("\nreconfigure {")[0], example.split("\nstream ")[1:3]
    head = head.replace("ranks=4  ", "ranks=4,5").replace("lost 5\n", "")
    head = head.replace("resume step=30 keep=none\n", "")
    return "\nstream ".join([head, *streams]).replace("stream dp=0", "stream dp=0,1")


def test_the_example_is_a_right_plan_in_canonical_form():
    """It verifies without findings and the formatter leaves it alone."""
    (example,) = re.findall(r"```plan\n(.*?)```", PAGE, flags=re.DOTALL)
    parsed = parse(example)
    assert verify(parsed) == []
    assert format_text(parsed) == example


def test_every_keyword_and_instruction_is_on_the_page():
    """Nothing of the language is left unexplained."""
    words = set(re.findall(r"[A-Za-z_]+", PAGE))
    assert set(KEYWORDS.values()) <= words
    assert {op.mnemonic for op in Op} <= words
