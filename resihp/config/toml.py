"""From TOML text to a checked Struct of sections, or to one error that can be acted on.

A Struct of sections has a Struct for each `[table]` and a tuple of Structs for each `[[table]]`.

msgspec reports the first error without the value, so each field is converted on its own and the
error is worded here: line, dotted key, value, what is wanted, nearest valid choice.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec

from resihp.config.places import line_of
from resihp.config.wording import wanted
from resihp.errors import ConfigError

__all__ = ["Problem", "place_of", "read_file", "read_text"]

_S = TypeVar("_S", bound=msgspec.Struct)
_Document = dict[str, Any]
_SHOWN_CHARACTERS = 60
MAX_FILE_BYTES = 1 << 22
"""Longest file that is read."""


class Problem(NamedTuple):
    """What is wrong with the value at `key` (a dotted path; the n-th table is `inject[n]`)."""

    key: str
    wanted: str


class _WrongError(Exception):
    """A problem on its way to `read_text`, which knows the text and words the error."""

    def __init__(self, key: str, wanted: str) -> None:
        super().__init__(key, wanted)
        self.problem = Problem(key, wanted)


def _as_it_is(document: dict[str, Any]) -> dict[str, Any]:
    return document


def read_file(
    path: str | Path,
    into: type[_S],
    problems: Callable[[_S], Iterable[Problem]],
    fill: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is,
) -> _S:
    """Read a file of sections. Raises ConfigError when it cannot be read or is not right."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    return read_text(text, into, problems, fill, path=str(path))


def read_text(
    text: str,
    into: type[_S],
    problems: Callable[[_S], Iterable[Problem]],
    fill: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is,
    *,
    path: str,
) -> _S:
    """The sections of a TOML text; `path` names it in errors.

    `fill` may add what the text only refers to. `problems` says what must hold between values; the
    first one is reported. Raises ConfigError, also one of `fill` that has a `key`.
    """
    try:
        document: _Document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    try:
        document = fill(document)
    except ConfigError as error:
        if error.key is None:
            raise
        raise _error(Problem(error.key, str(error)), document, text, path) from None
    try:
        decoded = _decode(document, into)
    except _WrongError as wrong:
        raise _error(wrong.problem, document, text, path) from None
    problem = next(iter(problems(decoded)), None)
    if problem is not None:
        raise _error(problem, document, text, path)
    return decoded


def place_of(path: str | Path, key: str) -> str:
    """`path:line` of the dotted `key`; `path` alone where it has no line of its own."""
    try:
        line = line_of(Path(path).read_text(encoding="utf-8"), key)
    except (OSError, UnicodeDecodeError):  # changed since it was read
        line = None
    return str(path) if line is None else f"{path}:{line}"


def _decode(document: _Document, into: type[_S]) -> _S:
    values: dict[str, object] = {}
    _reject_unknown(document, into, "")
    for field in msgspec.structs.fields(into):
        if get_origin(field.type) is tuple:
            values[field.name] = _tables(document.get(field.name, []), field.type, field.name)
        elif field.name in document:
            values[field.name] = _section(document[field.name], field.type, field.name)
        elif field.required:
            # An empty section names its own first missing key.
            values[field.name] = _section({}, field.type, field.name)
    return into(**values)


def _tables(value: object, tuple_type: object, key: str) -> tuple[msgspec.Struct, ...]:
    item_type = cast("type[msgspec.Struct]", get_args(tuple_type)[0])
    if not isinstance(value, list):
        raise _WrongError(key, f"must be tables, each written [[{key}]]")
    items = cast("list[object]", value)
    return tuple(_section(item, item_type, f"{key}[{i}]") for i, item in enumerate(items))


def _section(value: object, section_type: type[_S], key: str) -> _S:
    if not isinstance(value, dict):
        raise _WrongError(key, f"must be a table, written [{key}]")
    table = cast("_Document", value)
    _reject_unknown(table, section_type, f"{key}.")
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(section_type):
        here = f"{key}.{field.name}"
        if field.name in table:
            values[field.name] = _value(table[field.name], field.type, here)
        elif field.required:
            raise _WrongError(here, "is missing")
    return section_type(**values)


def _value(value: object, value_type: object, key: str) -> object:
    choices = _choices_of(value_type)
    if choices:
        # `is` on the type keeps 0 from being False.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        number = _number_beside(value_type)
        if number is None or isinstance(value, str):
            also = " or a whole number" if number is not None else ""
            raise _WrongError(key, _one_of(value, choices, also))
        value_type = number
    table_type = _table_of(value_type)
    if table_type is not None:
        return _section(value, table_type, key)
    try:
        return msgspec.convert(value, cast("type[object]", value_type))
    except msgspec.ValidationError as error:
        raise _WrongError(key, wanted(value, value_type, error)) from None


def _choices_of(value_type: object) -> tuple[object, ...]:
    """The values of a Literal, also of one that may be left out; () for other types."""
    optional = get_args(value_type) if get_origin(value_type) in (Union, UnionType) else ()
    literals = (each for each in (value_type, *optional) if get_origin(each) is Literal)
    return get_args(next(literals, None))


def _number_beside(value_type: object) -> object:
    """What a value may be beside one of a Literal, where that is a number; else None."""
    alternatives = get_args(value_type) if get_origin(value_type) in (Union, UnionType) else ()
    return next((each for each in alternatives if get_origin(each) is Annotated), None)


def _table_of(value_type: object) -> type[msgspec.Struct] | None:
    """The Struct that a value is, or may be beside None."""
    for choice in (value_type, *get_args(value_type)):
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            return choice
    return None


def _one_of(value: object, choices: tuple[object, ...], also: str = "") -> str:
    listed = " or ".join(_shown(choice) for choice in choices)
    return f"must be {listed}{also}{_suggestion(str(value), [str(c) for c in choices])}"


def _reject_unknown(table: _Document, section_type: type[msgspec.Struct], prefix: str) -> None:
    known = section_type.__struct_fields__
    for name in table:
        if name not in known:
            hint = _suggestion(name, list(known)) or f"; known here: {', '.join(known)}"
            raise _WrongError(f"{prefix}{name}", f"is no known key{hint}")


def _suggestion(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _error(problem: Problem, document: _Document, text: str, path: str) -> ConfigError:
    line = line_of(text, problem.key)
    place = f"{path}:{line}" if line is not None else path
    found, value = _lookup(document, problem.key)
    shown = f" = {_shown(value)}" if found and not isinstance(value, dict) else ""
    return ConfigError(f"{place}: {problem.key}{shown}: {problem.wanted}")


def _lookup(document: _Document, key: str) -> tuple[bool, object]:
    here: Any = document
    try:
        for part in key.replace("[", ".").replace("]", "").split("."):
            here = here[int(part) if part.isdigit() else part]
    except (IndexError, KeyError, TypeError):
        return False, None
    return True, here


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
