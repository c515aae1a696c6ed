"""Diagnostics as text like a good compiler's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.ir.diagnostics import Diagnostic, Span

__all__ = ["render_text", "summary"]

_NO_OTHERS: Mapping[str, str] = {}
_WIDTH = 100
"""Longer source lines are shown as a window around the caret."""


def render_text(
    diagnostics: Sequence[Diagnostic],
    text: str,
    path: str | None = None,
    others: Mapping[str, str] = _NO_OTHERS,
) -> str:
    """Each finding with its source line and a caret, its notes with theirs, and its hint.

    `others` are the texts of other files that notes may be about, by path.
    """
    where = path or "<text>"
    texts = _Texts(others)
    texts[where] = text.split("\n")
    return "\n".join(_render(diagnostic, texts, where) for diagnostic in diagnostics)


class _Texts(dict[str, list[str]]):
    """Lines by path, split when first asked for."""

    def __init__(self, others: Mapping[str, str]) -> None:
        super().__init__()
        self.others = others

    def __missing__(self, path: str) -> list[str]:
        self[path] = self.others[path].split("\n")
        return self[path]


def summary(diagnostics: Sequence[Diagnostic]) -> str:
    """`3 errors` or `1 error, 1 warning`; `ok` where there is nothing."""
    counts: dict[str, int] = {}
    for diagnostic in diagnostics:
        counts[diagnostic.severity.value] = counts.get(diagnostic.severity.value, 0) + 1
    parts = [f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in sorted(counts.items())]
    return ", ".join(parts) or "ok"


def _render(diagnostic: Diagnostic, texts: _Texts, where: str) -> str:
    span = diagnostic.span
    head = f"{diagnostic.severity.value}[{diagnostic.code}]: {diagnostic.message}"
    related = [related.span.line for related in diagnostic.related]
    gutter = max(len(str(line)) for line in [span.line, *related])
    parts = [f"{where}:{span.line}:{span.column}: {head}\n", _excerpt(span, texts[where], gutter)]
    for place in diagnostic.related:
        there = place.path or where
        at = f"{there}:{place.span.line}:{place.span.column}"
        parts.append(f"{at}: note: {place.message}\n")
        parts.append(_excerpt(place.span, texts[there], gutter))
    if diagnostic.hint is not None:
        parts.append(f"{' ' * gutter} = hint: {diagnostic.hint}\n")
    return "".join(parts)


def _excerpt(span: Span, lines: list[str], gutter: int) -> str:
    """The source line with a caret line under it."""
    line = lines[span.line - 1] if span.line <= len(lines) else ""
    start, end = span.column - 1, max(span.end_column - 1, span.column)
    begin = 0 if len(line) <= _WIDTH else max(0, start - _WIDTH // 4)
    shown = line[begin : begin + _WIDTH]
    width = max(1, min(end, begin + len(shown)) - start)
    printable = "".join(c if c.isprintable() else " " for c in shown)
    carets = " " * (start - begin) + "^" * width
    return f"{span.line:>{gutter}} | {printable}\n{' ' * gutter} | {carets}\n"
