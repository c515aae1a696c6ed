"""The resolved job file: every key with its value, as TOML that loads to the same config."""

from __future__ import annotations

import msgspec

from resihp.config.schema import JobConfig

__all__ = ["resolved"]

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def resolved(config: JobConfig) -> str:
    """TOML with all defaults filled in: `loads(resolved(c)) == c`."""
    names = [name for name in config.__struct_fields__ if name != "inject"]
    sections = [_table(f"[{name}]", getattr(config, name)) for name in names]
    sections += [_table("[[inject]]", injection) for injection in config.inject]
    return "\n".join(sections)


def _table(header: str, section: msgspec.Struct) -> str:
    lines = [header]
    for name, value in msgspec.structs.asdict(section).items():
        if value is not None:
            lines.append(f"{name} = {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: str | bool | int | float | tuple[str, ...] | msgspec.Struct) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, msgspec.Struct):
        items = msgspec.structs.asdict(value).items()
        said = ", ".join(f"{name} = {_scalar(item)}" for name, item in items if item is not None)
        return f"{{ {said} }}"
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\u{ord(character):04x}"
    return character
