"""Findings as a JSON array with one entry per file, in the order of the command line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.ir.diagnostics import Diagnostic, FileFindings

__all__ = ["render_json"]


class _File(msgspec.Struct, frozen=True):
    path: str
    diagnostics: tuple[Diagnostic, ...]


def render_json(files: Sequence[FileFindings]) -> str:
    """`path` and `diagnostics` of each file; lines and columns count from 1."""
    document = [_File(file.path, file.diagnostics) for file in files]
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
