"""Places of programs that come from several files, as lines of one text and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec.structs import replace

from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.source import Parsed, ParsedProgram, StreamSource

__all__ = ["Files", "JoinedPlan"]


class Files:
    """The texts of all programs, one below the other."""

    def __init__(self, files: Sequence[Sequence[ParsedProgram]]) -> None:
        """`files` has the programs of each file; none is empty."""
        texts = [programs[0].text for programs in files]
        self.text = "\n".join(texts)
        self.paths = [programs[0].path for programs in files]
        self.starts: list[int] = []
        """Lines that stand before each file."""
        num_lines = 0
        for text in texts:
            self.starts.append(num_lines)
            num_lines += text.count("\n") + 1
        self.programs = [
            self._moved(program, start)
            for programs, start in zip(files, self.starts, strict=True)
            for program in programs
        ]
        """All of them, with their places in `text`."""

    def _moved(self, program: ParsedProgram, start: int) -> ParsedProgram:
        def down(span: Span) -> Span:
            return Span(span.line + start, span.column, span.end_column)

        return replace(
            program,
            text=self.text,
            statements={word: down(span) for word, span in program.statements.items()},
            run=StreamSource(
                head=down(program.run.head),
                body_line=program.run.body_line + start,
                body=program.run.body,
            ),
        )

    def file_of(self, line: int) -> int:
        """Index of the file that a line of `text` belongs to."""
        return bisect_right(self.starts, line - 1) - 1

    def where(self, span: Span) -> str:
        """The line as a message names it."""
        if len(self.paths) == 1:
            return f"line {span.line}"
        file = self.file_of(span.line)
        return f"{self.paths[file]} line {span.line - self.starts[file]}"

    def by_file(self, findings: Sequence[Diagnostic]) -> list[list[Diagnostic]]:
        """Findings with places in their own files, one list per file."""
        found: list[list[Diagnostic]] = [[] for _ in self.paths]
        for finding in findings:
            file = self.file_of(finding.span.line)
            related = tuple(self._related(place, file) for place in finding.related)
            found[file].append(replace(finding, span=self._up(finding.span), related=related))
        return found

    def _related(self, place: Related, file: int) -> Related:
        other = self.file_of(place.span.line)
        path = None if other == file else self.paths[other]
        return Related(place.message, self._up(place.span), path)

    def _up(self, span: Span) -> Span:
        start = self.starts[self.file_of(span.line)]
        return Span(span.line - start, span.column, span.end_column)


class JoinedPlan(Parsed, frozen=True, kw_only=True, dict=True):
    """The plan that programs of one or more files are the expansion of."""

    files: Files

    def where(self, span: Span) -> str:
        """The line with its file, where there are several."""
        return self.files.where(span)
