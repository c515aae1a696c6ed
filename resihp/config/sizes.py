"""Byte sizes as people write them: `2GiB`, `512MiB`, `1073741824`."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNIT_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of a text such as `2GiB`. Raises ValueError that says what is wanted."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNIT_BYTES:
        raise ValueError("must be a whole number and KiB, MiB, GiB or TiB, such as 2GiB")
    return int(match[1]) * _UNIT_BYTES[match[2]]


def format_size(num_bytes: int) -> str:
    """The shortest exact text of a size: `parse_size(format_size(n)) == n`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNIT_BYTES[unit] == 0:
            return f"{num_bytes // _UNIT_BYTES[unit]}{unit}"
    return str(num_bytes)
