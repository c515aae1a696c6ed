"""Findings as SARIF 2.1.0, the interchange format of code scanners (an OASIS standard).

One run with every file of the command line. The rules are the codes that occur, each with its
explanation; `ruleId` is the stable code. Paths are relative to the working directory, columns
count characters, and fingerprints (`resihp.ir.fingerprint`) do not change when lines move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

import msgspec

from resihp.ir.codes import CODES
from resihp.ir.diagnostics import Diagnostic, FileFindings, Related, Span
from resihp.ir.fingerprint import fingerprints

__all__ = ["render_sarif"]

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
FINGERPRINT = "resihpFinding/v1"
ROOT = "%SRCROOT%"
"""SARIF's customary name of the directory that relative paths start from."""


class _Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base: SARIF spells its properties in camel case and leaves out what is not given."""


class Message(_Object, frozen=True, kw_only=True):
    """`message` of SARIF, as plain text."""

    text: str


class Rule(_Object, frozen=True, kw_only=True):
    """`reportingDescriptor`: one code."""

    id: str
    name: str
    short_description: Message
    full_description: Message
    help: Message


class Driver(_Object, frozen=True, kw_only=True):
    """`toolComponent`: which program found it."""

    name: str
    semantic_version: str
    rules: list[Rule]


class Tool(_Object, frozen=True, kw_only=True):
    """`tool`."""

    driver: Driver


class ArtifactLocation(_Object, frozen=True, kw_only=True):
    """`artifactLocation`: a file."""

    uri: str
    uri_base_id: str | None = None


class Snippet(_Object, frozen=True, kw_only=True):
    """`artifactContent`: the line as it stands in the file."""

    text: str


class Region(_Object, frozen=True, kw_only=True):
    """`region`; the end column is the first one that is not part of it."""

    start_line: int
    start_column: int
    end_column: int
    snippet: Snippet


class PhysicalLocation(_Object, frozen=True, kw_only=True):
    """`physicalLocation`."""

    artifact_location: ArtifactLocation
    region: Region


class Location(_Object, frozen=True, kw_only=True):
    """`location`; `id` and `message` only for related ones."""

    id: int | None = None
    physical_location: PhysicalLocation
    message: Message | None = None


class Result(_Object, frozen=True, kw_only=True):
    """`result`: one finding."""

    rule_id: str
    rule_index: int
    level: str
    message: Message
    locations: list[Location]
    related_locations: list[Location] = []
    partial_fingerprints: dict[str, str]


class Artifact(_Object, frozen=True, kw_only=True):
    """`artifact`: a file that was looked at, with or without findings; each once."""

    location: ArtifactLocation


class Run(_Object, frozen=True, kw_only=True):
    """`run`."""

    tool: Tool
    column_kind: str
    artifacts: list[Artifact]
    results: list[Result]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    schema: str = msgspec.field(name="$schema", default=SCHEMA)
    version: str = "2.1.0"
    runs: list[Run]


def render_sarif(files: Sequence[FileFindings], *, version: str) -> str:
    """The document; `version` is that of ResiHP."""
    codes = sorted({finding.code for file in files for finding in file.diagnostics})
    rule_index = {code: index for index, code in enumerate(codes)}
    texts = {file.path: file.text.split("\n") for file in files}
    run = Run(
        column_kind="unicodeCodePoints",
        tool=Tool(
            driver=Driver(name="resihp", semantic_version=version, rules=[_rule(c) for c in codes])
        ),
        artifacts=[Artifact(location=_artifact(path)) for path in texts],
        results=[result for file in files for result in _results(file, rule_index, texts)],
    )
    document = msgspec.json.encode(Log(runs=[run]))
    return msgspec.json.format(document, indent=2).decode() + "\n"


def _rule(code: str) -> Rule:
    title, explanation, consequence = CODES[code]
    return Rule(
        id=code,
        name="".join(word.capitalize() for word in title.replace("-", " ").split()),
        short_description=Message(text=title),
        full_description=Message(text=explanation),
        help=Message(
            text=f"{explanation}\n\n{consequence}\n\n`resihp explain {code}` shows an example."
        ),
    )


def _results(
    file: FileFindings, rule_index: dict[str, int], texts: Mapping[str, Sequence[str]]
) -> Iterator[Result]:
    is_csv = file.path.lower().endswith(".csv")
    prints = fingerprints(file.diagnostics, file.text, is_csv=is_csv)
    for finding, fingerprint in zip(file.diagnostics, prints, strict=True):
        yield Result(
            rule_id=finding.code,
            rule_index=rule_index[finding.code],
            level=finding.severity.value,
            message=_message(_text(finding)),
            locations=[Location(physical_location=_place(file.path, finding.span, texts))],
            related_locations=[
                _related(related.path or file.path, number, related, texts)
                for number, related in enumerate(finding.related, start=1)
            ],
            partial_fingerprints={FINGERPRINT: fingerprint},
        )


def _message(text: str) -> Message:
    """Braces are placeholders in SARIF's messages; literal ones are doubled."""
    return Message(text=text.replace("{", "{{").replace("}", "}}"))


def _text(finding: Diagnostic) -> str:
    return finding.message if finding.hint is None else f"{finding.message}\nHint: {finding.hint}"


def _related(
    path: str, number: int, related: Related, texts: Mapping[str, Sequence[str]]
) -> Location:
    return Location(
        id=number,
        physical_location=_place(path, related.span, texts),
        message=_message(related.message),
    )


def _place(path: str, span: Span, texts: Mapping[str, Sequence[str]]) -> PhysicalLocation:
    return PhysicalLocation(
        artifact_location=_artifact(path),
        region=Region(
            start_line=span.line,
            start_column=span.column,
            end_column=span.end_column,
            snippet=Snippet(text=texts[path][span.line - 1]),
        ),
    )


def _artifact(path: str) -> ArtifactLocation:
    """A path below the working directory is relative to the root; any other one is absolute."""
    if path.startswith("/"):
        return ArtifactLocation(uri="file://" + quote(path))
    return ArtifactLocation(uri=quote(path), uri_base_id=ROOT)
