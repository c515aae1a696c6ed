"""One cell of a torch pipelining CSV: its actions, or what exactly is wrong with it.

    cell   = "" | action | "(" action ";" action ")OVERLAP_F_B"
    action = stage kind micro-batch | stage kind

torch reads a cell from its start and leaves alone what follows, so that `2F0F1` is 2F0 to it.
Here a cell is read whole. Blanks around actions mean nothing.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from resihp.ir.model import Op

__all__ = ["KINDS", "OLD_KINDS", "Action", "CellError", "quoted", "read_cell"]

KINDS = {
    "F": Op.F,
    "I": Op.B,
    "B": Op.BW,
    "W": Op.W,
    "SEND_F": Op.SEND_ACT,
    "RECV_F": Op.RECV_ACT,
    "SEND_B": Op.SEND_GRAD,
    "RECV_B": Op.RECV_GRAD,
    "UNSHARD": Op.GATHER_PARAMS,
    "RESHARD": Op.FREE_PARAMS,
    "REDUCE_GRAD": Op.REDUCE_GRADS,
}
"""What torch calls each operation."""

OLD_KINDS = {kind: op for kind, op in KINDS.items() if kind != "I"} | {"B": Op.B, "BW": Op.BW}
"""The same in 2024: B was the gradient of the input alone."""

_OVERLAP = "OVERLAP_F_B"
_WHOLE_STAGE = frozenset(("UNSHARD", "RESHARD", "REDUCE_GRAD"))
_COMPUTE = frozenset(("F", "I", "B", "W", "BW"))
_KNOWN = KINDS.keys() | OLD_KINDS.keys()

_MOST_DIGITS = 9
_SHOWN = 40
"""Longest text that a message quotes."""
_ACTION = re.compile(r"[ \t]*([0-9]{1,9})([A-Z_]+)([0-9]{1,9})?[ \t]*")
_PAIR = re.compile(r"[ \t]*\(([^();]*);([^();]*)\)OVERLAP_F_B[ \t]*")


class Action(NamedTuple):
    """One action, with the columns of the cell that it takes, from 0."""

    stage: int
    kind: str
    """A word of `KINDS` or `OLD_KINDS`."""
    microbatch: int | None
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class CellError(Exception):
    """A cell that cannot be read: why, and which of its columns, from 0, show it."""

    def __init__(self, message: str, start: int, end: int, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.start = start
        self.end = max(end, start + 1)
        self.hint = hint


def read_cell(text: str) -> tuple[Action, ...]:
    """The actions of a cell: none where it is empty, two that are overlapped, or one.

    Raises `CellError`.
    """
    found = _ACTION.fullmatch(text)
    if found is not None:
        return (_action(found, 0),)
    if not text.strip(" \t"):
        return ()
    found = _PAIR.fullmatch(text)
    if found is not None:
        first, second = (_read_action(found[part], found.start(part)) for part in (1, 2))
        return _part(first), _part(second)
    if "(" in text or ")" in text or ";" in text:
        raise _why_no_pair(text)
    raise _why_no_action(text, 0)


def _read_action(text: str, start: int) -> Action:
    """The action that is all of `text`, which begins at column `start` of its cell."""
    found = _ACTION.fullmatch(text)
    if found is None:
        raise _why_no_action(text, start)
    return _action(found, start)


def _action(found: re.Match[str], start: int) -> Action:
    stage, kind, number = found.groups()
    if kind not in _KNOWN:
        raise _why_no_action(found.string, start)
    if (number is None) != (kind in _WHOLE_STAGE):
        raise _why_micro_batch(found, start)
    microbatch = None if number is None else int(number)
    end = found.end(2) if number is None else found.end(3)
    return Action(int(stage), kind, microbatch, start + found.start(1), start + end)


def _part(action: Action) -> Action:
    if action.kind not in _COMPUTE:
        raise CellError(
            f"`{action}` cannot be overlapped: the parts of {_OVERLAP} are computed (F, I, B or W)",
            action.start,
            action.end,
        )
    return action


def _why_micro_batch(found: re.Match[str], start: int) -> CellError:
    """The action has a micro-batch that it must not have, or the other way round."""
    kind, begin = found[2], start + found.start(1)
    if found[3] is None:
        message = f"`{kind}` needs a micro-batch: its number follows, as in `{found[1]}{kind}0`"
        return CellError(message, begin, start + found.end(2))
    message = f"`{kind}` is of a whole stage: no micro-batch may follow it"
    return CellError(message, start + found.start(3), start + found.end(3))


def _why_no_action(text: str, start: int) -> CellError:
    """Reads as far as it goes and says what stops it."""
    begin = len(text) - len(text.lstrip(" \t"))
    code = text.rstrip(" \t")
    if not code.strip(" \t"):
        return CellError("an action is missing here", start, start + len(text))
    found = re.match(r"([+-]?)([0-9]*)([A-Za-z_]*)(-?)([0-9]*)", code[begin:])
    assert found is not None, "all of it may be empty"
    sign, stage, kind, minus, number = found.groups()
    start += begin

    def error(part: int, message: str, hint: str | None = None) -> CellError:
        return CellError(message, start + found.start(part), start + found.end(part), hint)

    if sign or minus:
        what = "stages" if sign else "micro-batches"
        return error(1 if sign else 4, f"{what} are numbered from 0, without a sign")
    if not stage:
        at = start + found.start(3)
        return CellError("an action starts with its stage, as in `0F3`", at, at + 1)
    if len(stage) > _MOST_DIGITS or len(number) > _MOST_DIGITS:
        part = 2 if len(stage) > _MOST_DIGITS else 5
        return error(part, f"a number has at most {_MOST_DIGITS} digits")
    if kind == _OVERLAP:
        return error(3, f"{_OVERLAP} stands around two actions: `(0F7;7B3){_OVERLAP}`")
    if kind not in _KNOWN:
        return _why_no_kind(kind, start + found.start(3), len(code) + start - begin)
    rest = code[begin + found.end() :]
    assert rest, "nothing else keeps the action from being read"
    action = found[0]
    at = start + found.end()
    message = f"text after the action `{action}`: {quoted(rest)}"
    return CellError(message, at, at + len(rest), "one cell holds one action; cells end with `,`")


def _why_no_kind(kind: str, at: int, end: int) -> CellError:
    if not kind:
        return CellError("the kind of action is missing after the stage", at, end)
    near = difflib.get_close_matches(kind.upper()[:40], KINDS, n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else None
    known = ", ".join([*KINDS, _OVERLAP])
    message = f"{quoted(kind)} is no kind of action; torch knows {known}"
    return CellError(message, at, at + len(kind), hint)


def _why_no_pair(text: str) -> CellError:
    """A cell with a parenthesis or a semicolon that is no overlapped pair."""
    hint = f"two actions are overlapped as `(0F7;7B3){_OVERLAP}`"
    begin = len(text) - len(text.lstrip(" \t"))
    end = len(text.rstrip(" \t"))

    def error(message: str, start: int, stop: int) -> CellError:
        return CellError(message, start, stop, hint)

    if text[begin] != "(":
        at = min(place for place in map(text.find, "();") if place >= 0)
        return error(f"`{text[at]}` stands inside an action", at, at + 1)
    close = text.find(")")
    if (inner := text.find("(", begin + 1)) >= 0 and (close < 0 or inner < close):
        return error("overlapped actions cannot be nested", inner, inner + 1)
    if close < 0:
        return error("the `(` is never closed", begin, begin + 1)
    num_parts = text.count(";", begin, close) + 1
    if num_parts != 2:
        what = f"are {num_parts} actions" if num_parts > 2 else "is one action"
        if not text[begin + 1 : close].strip(" \t"):
            what = "is none"
        return error(f"two actions are overlapped, here {what}", begin, close + 1)
    word = text[close + 1 : end]
    if word.startswith(_OVERLAP):
        after = close + 1 + len(_OVERLAP)
        message = f"text after `{_OVERLAP}`: {quoted(text[after:end])}"
        return error(message, after, end)
    message = f"a pair of actions is followed by {_OVERLAP}, not by {quoted(word)}"
    return error(message, close + 1, end)


def quoted(text: str) -> str:
    """For a message: in backticks, cut to a length, nothing in it that a terminal would obey."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "`" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown) + "`"
