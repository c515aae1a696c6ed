"""The `key=value` words of a line: which keys it takes, and what values they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from resihp.ir.lines import BLANKS, Budget, LineError, did_you_mean, quote
from resihp.ir.model import GroupName, LayerRange, MicroBatch
from resihp.ir.trees import intervals, listed, micro_batches, place, refuse, tokens, trees

if TYPE_CHECKING:
    from lark import Token, Tree

__all__ = ["KEYS", "Fields"]

_Kind = Literal["number", "numbers", "range", "ranges", "place", "kept"]

KEYS: dict[str, dict[str, _Kind]] = {
    "model": dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "number"),
    "mesh": {"tp": "number", "pp": "number", "dp": "number"},
    "batch": {"microbatches": "number", "tokens": "number"},
    "resume": {"step": "number", "keep": "kept"},
    "group": {"ranks": "numbers", "layers": "ranges"},
    "stream": {"dp": "numbers", "pp": "number"},
    "rank": {
        "group": "place",
        "member": "number",
        "tp": "number",
        "layers": "ranges",
        "stages": "numbers",
        "of": "number",
    },
    "reshard": {"layers": "range"},
    "move": {"layers": "range"},
    "restore": {"layers": "range", "at": "number"},
    "load": {"layers": "range", "step": "number"},
}
"""Keys of each kind of line, with what their values are."""

_SAYS: dict[_Kind, str] = {
    "number": "a number",
    "numbers": "numbers",
    "range": "a range such as `0..3`",
    "ranges": "ranges such as `0..3`",
    "place": "a group such as `dp0.pp1`",
    "kept": "micro-batches such as `0,2@1`, or `none`",
}


class _Value(NamedTuple):
    key: Token
    token: Token
    """The first token of the value."""
    numbers: Tree[Token] | None


class Fields:
    """The fields of one line, checked against the keys that it takes.

    `tree` is the line, `code` its text (for the place of what is missing).
    """

    def __init__(self, keyword: str, tree: Tree[Token], budget: Budget, code: str) -> None:
        kinds = KEYS[keyword]
        self.values: dict[str, _Value] = {}
        self.budget = budget
        for attribute in trees(tree):
            if attribute.data == "attribute":
                self._add(_value_of(attribute), kinds)
        missing = [key for key in kinds if key not in self.values]
        if missing:
            end = len(code.rstrip(BLANKS)) + 1
            names = ", ".join(f"`{key}=`" for key in missing)
            raise LineError(end, end + 1, f"this line lacks {names}", code="RHP003")

    def _add(self, value: _Value, kinds: dict[str, _Kind]) -> None:
        key = str(value.key)
        if key in self.values:
            refuse(value.key, f"`{key}` is given twice in this line", code="RHP004")
        if key not in kinds:
            takes = ", ".join(f"`{name}`" for name in kinds)
            refuse(
                value.key,
                f"unknown key {quote(key)}",
                hint=did_you_mean(key, kinds) or f"this line takes {takes}",
            )
        _check_value(value, kinds[key])
        self.values[key] = value

    def number(self, key: str) -> int:
        """The value of a key that takes one number."""
        return intervals(self._numbers(key))[0].first

    def numbers(self, key: str) -> tuple[int, ...]:
        """The value of a key that takes a list."""
        return listed(self._numbers(key), self.budget)

    def ranges(self, key: str) -> tuple[LayerRange, ...]:
        """The value of a key that takes one or more ranges."""
        return tuple(LayerRange(first, last) for first, last, _ in intervals(self._numbers(key)))

    def place(self, key: str) -> GroupName:
        """The value of a key that takes a group."""
        return place(self.values[key].token)

    def kept(self, key: str) -> tuple[MicroBatch, ...]:
        """The value of a key that takes micro-batches."""
        numbers = self.values[key].numbers
        return () if numbers is None else micro_batches(numbers, self.budget)

    def _numbers(self, key: str) -> Tree[Token]:
        numbers = self.values[key].numbers
        assert numbers is not None, "checked when the field was added"
        return numbers


def _value_of(attribute: Tree[Token]) -> _Value:
    key = tokens(attribute)[0]
    numbers = trees(attribute)
    if numbers:
        return _Value(key, tokens(trees(numbers[0])[0])[0], numbers[0])
    return _Value(key, tokens(attribute)[1], None)


def _check_value(value: _Value, kind: _Kind) -> None:
    key = str(value.key)
    if kind == "kept":
        if value.token.type == "PLACE":
            refuse(value.token, f"`{key}` needs {_SAYS[kind]}")
        return
    if (kind == "place") != (value.token.type == "PLACE") or value.token.type == "NONE":
        refuse(value.token, f"`{key}` needs {_SAYS[kind]}")
    if value.numbers is None or kind in ("numbers", "ranges"):
        return
    given = intervals(value.numbers)
    if len(given) > 1:
        refuse(given[1].token, f"`{key}` takes one {kind}, not a list")
    if kind == "number" and len(tokens(trees(value.numbers)[0])) > 1:
        refuse(value.token, f"`{key}` takes one number, not a range")
