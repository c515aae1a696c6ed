"""Where a key stands in a TOML text. tomllib keeps no positions, so the lines are looked at again.

Only the ordinary spelling is found, `[section]` and `key = value` on a line of its own; for a key
written otherwise (dotted key, inside a longer string) there is no line. For one inside a table of
a section, `[section.table]` or an inline one, the line is that of the table.
"""

from __future__ import annotations

import re
import tomllib

__all__ = ["line_of"]

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_PATH = re.compile(r"(?P<section>[^.\[]+)(\[(?P<index>\d+)\])?(\.(?P<name>.+))?")


def line_of(text: str, key: str) -> int | None:
    """Line (from 1) of the dotted `key`, or of its section's header when the key is missing."""
    path = _PATH.fullmatch(key)
    if path is None:
        return None
    section, index, name = path["section"], int(path["index"] or 0), path["name"]
    keys = _places(section, index, name)
    tables = [(section, index), *((table, 0) for table in _tables(section, name or ""))]
    here: tuple[str, int] | None = None  # the table of the current line; None: the top
    num_seen: dict[str, int] = {}
    header_line: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = header[2]
            here = (table, num_seen.get(table, 0))
            num_seen[table] = here[1] + 1
            if here in tables:
                header_line = number
        elif here in keys and _sets(line, keys[here]):
            return number
    return header_line


def _places(section: str, index: int, name: str | None) -> dict[tuple[str, int] | None, str]:
    """Keys to look for, by table: the one that holds all of `name`, or the last of it."""
    if name is None:
        return {None: section}
    outer, _, last = name.rpartition(".")
    places: dict[tuple[str, int] | None, str] = {(section, index): name.partition(".")[0]}
    if outer:
        places[f"{section}.{outer}", 0] = last
    return places


def _tables(section: str, name: str) -> list[str]:
    """Tables inside the section whose header is the place of `name` where nothing nearer is."""
    outer, _, _ = name.rpartition(".")
    return [f"{section}.{inner}" for inner in (outer, name) if inner]


def _sets(line: str, name: str) -> bool:
    match = _KEY.match(line)
    if match is None or match[1] != name:
        return False
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True
