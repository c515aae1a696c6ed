"""`docs/plan-language.md` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from resihp.ir.codes import CODES
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.ir.printer import format_text
from resihp.ir.statements import KEYWORDS
from resihp.ir.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "plan-language.md").read_text(encoding="utf-8")


def test_the_table_of_codes_is_that_of_the_program():
    """Every code with its title and meaning, no other, in order."""
    rows = re.findall(r"^\| `(RHP\d+)` \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert rows == [(code, title, meaning) for code, (title, meaning) in CODES.items()]


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
