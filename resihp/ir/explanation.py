"""The example of each diagnostic code: a plan with the fault and the same plan mended.

They are files, `examples/RHP412.bad.plan` and `examples/RHP412.good.plan`; a code that needs the
plan before has it as `.previous.plan`. Codes about torch's CSV have `.csv` files instead, those
about programs `.program` files. The tests hold every bad one to its code and nothing else.
"""

from __future__ import annotations

import difflib
from importlib import resources
from itertools import dropwhile

import msgspec

from resihp.ir.codes import CODES

__all__ = ["Example", "change", "example_of", "file_of", "list_codes"]

AREAS = {
    "0": "reading the text",
    "1": "ranges and names",
    "2": "topology",
    "3": "exactly once",
    "4": "data flow and channel order",
    "5": "progress",
    "6": "memory",
    "7": "gradients",
    "8": "adaptation",
    "9": "lint (warnings; `resihp verify --lint`)",
}
"""What the hundreds of a code say, in the order in which the verifier works."""

_SUFFIXES = {"RHP01": "csv", "RHP42": "program"}
"""Of the files of codes that are not about plans."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one code; `previous` is the plan that ran before both."""

    code: str
    bad: str
    good: str
    previous: str | None

    def file(self, kind: str) -> str:
        """The name of its file; `kind` is `bad`, `good` or `previous`."""
        return file_of(self.code, kind)


def file_of(code: str, kind: str) -> str:
    """The name of the file of one text of a code."""
    return f"{code}.{kind}.{_SUFFIXES.get(code[:5], 'plan')}"


def example_of(code: str) -> Example:
    """The example of a code of the table."""
    bad, good = _read(code, "bad"), _read(code, "good")
    assert bad is not None, f"{code} has no bad example"
    assert good is not None, f"{code} has no good example"
    return Example(code=code, bad=bad, good=good, previous=_read(code, "previous"))


def change(example: Example) -> str:
    """What mends the bad example: its lines with `-`, the mended ones with `+`, some around."""
    bad, good = _without_title(example.bad), _without_title(example.good)
    header, *lines = list(difflib.unified_diff(bad, good, n=2, lineterm=""))[1:]
    assert header.startswith("+++"), "the two examples differ"
    shown = ["..." if line.startswith("@@") else line for line in lines[1:]]
    return "\n".join(line.rstrip() for line in shown) + "\n"


def _without_title(text: str) -> list[str]:
    """The lines after the comments that the file starts with."""
    return list(dropwhile(lambda line: line.startswith("#"), text.splitlines()))


def list_codes() -> str:
    """All codes with their titles, area by area."""
    parts: list[str] = []
    for digit, area in AREAS.items():
        codes = [code for code in CODES if code[3] == digit]
        parts.append("\n".join([area, *(f"  {code}  {CODES[code].title}" for code in codes)]))
    return "\n\n".join(parts) + "\n"


def _read(code: str, kind: str) -> str | None:
    file = resources.files("resihp.ir").joinpath("examples", file_of(code, kind))
    return file.read_text(encoding="utf-8") if file.is_file() else None
