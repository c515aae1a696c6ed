"""Collecting findings: one per place and kind, however many replicas share the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.ir.diagnostics import Diagnostic, Related, Severity, Span
from resihp.ir.statements import spell_numbers

__all__ = ["Findings", "listed"]

_SHOWN = 8

_Key = tuple[str, Span, tuple[Span, ...], object]


class Findings:
    """Findings of one verification, all of the same severity."""

    def __init__(self, severity: Severity = Severity.ERROR) -> None:
        self._severity = severity
        self.alike: Mapping[int, tuple[int, ...]] = {}
        """Replicas that each replica stands for."""
        self._found: dict[_Key, Diagnostic] = {}
        self._replicas: dict[_Key, list[int]] = {}

    def add(
        self,
        code: str,
        span: Span,
        message: str,
        *,
        related: tuple[Related, ...] = (),
        hint: str | None = None,
        replica: int | None = None,
        detail: object = None,
    ) -> None:
        """Report `code` at `span`.

        The same finding for several replicas that share a stream is reported once, in the words
        of the first, with the others' numbers. `detail` tells apart findings of one code at
        one place.
        """
        key = code, span, tuple(place.span for place in related), detail
        if key not in self._found:
            self._found[key] = Diagnostic(
                code=code,
                message=message,
                span=span,
                severity=self._severity,
                related=related,
                hint=hint,
            )
        if replica is not None:
            self._replicas.setdefault(key, []).extend(self.alike.get(replica, (replica,)))

    def __len__(self) -> int:
        return len(self._found)

    def has(self, *areas: str) -> bool:
        """Whether a finding's code starts with one of `areas` (such as `RHP1`)."""
        return any(code.startswith(areas) for code, *_ in self._found)

    def sorted(self) -> list[Diagnostic]:
        """All findings by place, then code."""
        found = [
            self._with_replicas(diagnostic, self._replicas.get(key, []))
            for key, diagnostic in self._found.items()
        ]
        return sorted(found, key=lambda finding: (finding.span, finding.code))

    @staticmethod
    def _with_replicas(diagnostic: Diagnostic, replicas: list[int]) -> Diagnostic:
        others = sorted(set(replicas[1:]) - set(replicas[:1]))
        if not others:
            return diagnostic
        plural = "s" if len(others) > 1 else ""
        message = f"{diagnostic.message} (and in replica{plural} {spell_numbers(others)})"
        return Diagnostic(
            code=diagnostic.code,
            message=message,
            span=diagnostic.span,
            severity=diagnostic.severity,
            related=diagnostic.related,
            hint=diagnostic.hint,
        )


def listed(numbers: Sequence[int], total: int | None = None) -> str:
    """`0..3,7` for a message; a long list is cut with the number of the rest."""
    shown = spell_numbers(numbers[:_SHOWN])
    rest = (len(numbers) if total is None else total) - min(len(numbers), _SHOWN)
    return f"{shown} and {rest} more" if rest > 0 else shown
