"""Where a key stands in a TOML text. tomllib keeps no positions, so the lines are looked at again.

Only the ordinary spelling is found, `[section]` and `key = value` on a line of its own; for a key
written otherwise (inline table, dotted key, inside a longer string) there is no line.
"""

from __future__ import annotations

import re
import tomllib

__all__ = ["line_of"]

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_-]+)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_PATH = re.compile(r"(?P<section>[^.\[]+)(\[(?P<index>\d+)\])?(\.(?P<name>.+))?")


def line_of(text: str, key: str) -> int | None:
    """Line (from 1) of the dotted `key`, or of its section's header when the key is missing."""
    path = _PATH.fullmatch(key)
    if path is None:
        return None
    wanted = (path["section"], int(path["index"] or 0)) if path["name"] else None
    name = path["name"] or path["section"]
    here: tuple[str, int] | None = None  # the table of the current line; None: the top
    num_seen: dict[str, int] = {}
    header_line: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            section = header[2]
            here = (section, num_seen.get(section, 0))
            num_seen[section] = here[1] + 1
            if here == (path["section"], int(path["index"] or 0)):
                header_line = number
        elif here == wanted and _sets(line, name):
            return number
    return header_line


def _sets(line: str, name: str) -> bool:
    match = _KEY.match(line)
    if match is None or match[1] != name:
        return False
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True
