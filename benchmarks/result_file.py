"""Tables of numbers, printed beside those of the run before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_WORTH_SAYING = 0.15
"""Changes below this share are noise of the machine."""

Row = Mapping[str, float | int | str]


def load_results(path: Path) -> dict[str, dict[str, Row]]:
    """Rows by table and label; empty where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save_results(path: Path, tables: Mapping[str, Mapping[str, Row]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tables, indent=1) + "\n")


def print_table(
    title: str, rows: Mapping[str, Row], before: Mapping[str, Row] | None = None
) -> None:
    """A Markdown table; a number that changed since `before` is followed by how much."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [["", *columns]]
    for label, row in rows.items():
        old = (before or {}).get(label, {})
        lines.append([label, *(_cell(row.get(key, ""), old.get(key)) for key in columns)])
    print(f"\n### {title}\n")
    _print_lines(lines)


def _cell(value: float | int | str, old: float | int | str | None) -> str:
    if isinstance(value, str):
        return value
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    if isinstance(value, float) and isinstance(old, float) and old:
        change = value / old - 1
        if abs(change) > _WORTH_SAYING:
            text += f" ({change:+.0%})"
    return text


def _print_lines(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        print("| " + " | ".join(map(str.ljust, line, widths)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
