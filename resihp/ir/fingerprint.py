"""An identity of a finding that survives edits elsewhere in the file.

It is made of the code, the block that the line stands in (`stream dp=0 pp=1`), the line in
canonical spacing and the words that the caret covers; never of line numbers. Findings of one
file that agree in all of these are told apart by their order. In torch's CSV the words alone count,
since a cell names its stage and a line is all that a rank runs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from resihp.ir.diagnostics import Diagnostic
from resihp.ir.lines import BLANKS, code_of

__all__ = ["fingerprints"]


def fingerprints(
    diagnostics: Sequence[Diagnostic], text: str, *, is_csv: bool = False
) -> list[str]:
    """One per finding, such as `1f0e5a8c9d2b7c34:1`. The text need not be a valid plan."""
    lines = text.split("\n")
    blocks = _blocks(lines)
    seen: Counter[str] = Counter()
    found: list[str] = []
    for diagnostic in diagnostics:
        at = diagnostic.span.line - 1
        covered = lines[at][diagnostic.span.column - 1 : diagnostic.span.end_column - 1]
        around = () if is_csv else (blocks[at], _words(lines[at]))
        parts = (diagnostic.code, *around, _words(covered))
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        seen[digest] += 1
        found.append(f"{digest}:{seen[digest]}")
    return found


def _blocks(lines: Sequence[str]) -> list[str]:
    """The head of the block that each line stands in; empty outside of blocks.

    A `run` block belongs to the `rank` line before it: a text may hold several programs.
    """
    inside, rank = "", ""
    blocks: list[str] = []
    for line in lines:
        code = code_of(line).strip(BLANKS)
        if code == "}":
            inside = ""
        blocks.append(inside)
        if code.endswith("{"):
            inside = f"{rank}{_words(code.removesuffix('{'))}"
        elif not inside and code.startswith("rank "):
            rank = f"{_words(code)} "
    return blocks


def _words(line: str) -> str:
    return " ".join(code_of(line).split())
