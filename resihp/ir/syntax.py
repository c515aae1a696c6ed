"""Reading one line with the lark grammar, and saying in our words why it cannot be read."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, NoReturn, cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Mesh,
    ModelShape,
    Op,
    Reshard,
    Resume,
)
from resihp.ir.statements import (
    KEYWORDS,
    Lost,
    Memory,
    Order,
    ReconfigureHead,
    Standby,
    Statement,
    StreamHead,
    Version,
)

__all__ = [
    "BODY_WORDS",
    "MAX_NUMBER",
    "RESHARD_WORDS",
    "STATEMENT_WORDS",
    "Budget",
    "LineError",
    "parse_tree",
    "quote",
    "read_instruction",
    "read_reshard",
    "read_statement",
]

MAX_NUMBER = 10**9
MAX_LISTED = 1 << 22
"""Numbers that all lists of one text may hold together."""

BODY_WORDS = {op.mnemonic: op for op in Op}
RESHARD_WORDS = ("reshard",)
STATEMENT_WORDS = tuple(word for word in KEYWORDS.values() if word != "reshard")

_TERMINALS = {
    "INT": "a number",
    "NAME": "a name",
    "PLACE": "a group such as `dp0.pp1`",
    "SIZE": "a size such as `16GiB`",
    "KEY": "`key=value`",
    "NONE": "`none`",
    "_EQUALS": "`=`",
    "_COMMA": "`,`",
    "_DOTS": "`..`",
    "_AT": "`@` and a replica",
    "_ARROW": "`->`",
    "$END": "the end of the line",
}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class LineError(Exception):
    """Why a line cannot be read; columns count from 1."""

    def __init__(
        self,
        column: int,
        end_column: int,
        message: str,
        *,
        hint: str | None = None,
        code: str = "RHP001",
    ) -> None:
        super().__init__(message)
        self.column = column
        self.end_column = max(end_column, column + 1)
        self.message = message
        self.hint = hint
        self.code = code


class Budget:
    """How many numbers the lists of one text may still hold."""

    def __init__(self, numbers: int = MAX_LISTED) -> None:
        self.numbers = numbers


@cache
def _grammar() -> Lark:
    """The language: `grammar.lark` as an LALR parser with one start symbol per kind of text."""
    text = resources.files("resihp.ir").joinpath("grammar.lark").read_text(encoding="utf-8")
    starts = ["file", "statement", "reshard", "instruction"]
    return Lark(text, parser="lalr", start=starts, maybe_placeholders=False)


def parse_tree(
    text: str, start: Literal["file", "statement", "reshard", "instruction"]
) -> Tree[Token]:
    """`text` as a tree of the grammar's rule `start`; raises lark's `UnexpectedInput`."""
    return _grammar().parse(text, start=start)  # pyright: ignore[reportUnknownMemberType] -- lark leaves its text type open


def quote(text: str) -> str:
    """`text` for a message: at most 40 characters, unprintable ones escaped."""
    short = text if len(text) <= 40 else text[:37] + "..."
    return "`" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in short) + "`"


def read_statement(code: str, budget: Budget) -> Statement:
    """The statement of a line outside a block (comment already cut off)."""
    _check_first_word(code, STATEMENT_WORDS, "statement")
    (tree,) = _trees(_parse(code, "statement"))
    keyword = code.split(None, 1)[0]
    return _build(keyword, tree, budget, code)


def read_reshard(code: str, budget: Budget) -> Reshard:
    """The line of a `reconfigure` block."""
    _check_first_word(code, RESHARD_WORDS, "line of a `reconfigure` block")
    tree = _parse(code, "reshard")
    fields = _Fields(tree, {"layers": "range"}, budget, code)
    source, target = _tokens(tree)
    return Reshard(layers=fields.layers(), source=_place(source), target=_place(target))


def read_instruction(code: str) -> Instr:
    """The instruction of a line of a `stream` block."""
    _check_first_word(code, tuple(BODY_WORDS), "instruction")
    tree = _parse(code, "instruction")
    op = BODY_WORDS[str(_tokens(tree)[0])]
    operands = _trees(tree)
    if not operands:
        return Instr(op)
    numbers = [_number(token) for token in _tokens(operands[0])]
    return Instr(op, numbers[0], numbers[1] if len(numbers) > 1 else None)


# --- lark trees ------------------------------------------------------------------------------


def _parse(code: str, start: Literal["statement", "reshard", "instruction"]) -> Tree[Token]:
    try:
        return parse_tree(code, start)
    except UnexpectedInput as error:
        raise _in_our_words(error, code) from None


def _trees(tree: Tree[Token]) -> list[Tree[Token]]:
    return [child for child in tree.children if isinstance(child, Tree)]


def _tokens(tree: Tree[Token]) -> list[Token]:
    return [child for child in tree.children if isinstance(child, Token)]


def _column(token: Token) -> int:
    assert token.column is not None
    return token.column


def _refuse(token: Token, message: str, *, hint: str | None = None, code: str) -> NoReturn:
    column = _column(token)
    raise LineError(column, column + len(token), message, hint=hint, code=code)


def _number(token: Token) -> int:
    # Length first: int() of a million digits is slow.
    digits = str(token)
    if len(digits) > 10 or int(digits) > MAX_NUMBER:
        _refuse(token, f"the number {quote(digits)} is larger than {MAX_NUMBER}", code="RHP006")
    return int(digits)


def _place(token: Token) -> GroupName:
    replica, stage = str(token)[2:].split(".pp")
    if max(len(replica), len(stage)) > 9:
        _refuse(token, f"the numbers of {quote(str(token))} are too large", code="RHP006")
    return GroupName(int(replica), int(stage))


class _Interval(NamedTuple):
    first: int
    last: int
    token: Token


def _intervals(numbers: Tree[Token]) -> list[_Interval]:
    intervals: list[_Interval] = []
    for tree in _trees(numbers):
        tokens = _tokens(tree)
        first, last = _number(tokens[0]), _number(tokens[-1])
        if last < first:
            _refuse(
                tokens[0],
                f"the range {first}..{last} runs backwards",
                hint=f"write {last}..{first}",
                code="RHP001",
            )
        intervals.append(_Interval(first, last, tokens[0]))
    return intervals


def _listed(numbers: Tree[Token], budget: Budget) -> tuple[int, ...]:
    listed: list[int] = []
    for first, last, token in _intervals(numbers):
        budget.numbers -= last - first + 1
        if budget.numbers < 0:
            _refuse(
                token, f"the lists of this text name more than {MAX_LISTED} numbers", code="RHP006"
            )
        listed.extend(range(first, last + 1))
    return tuple(listed)


# --- key=value -------------------------------------------------------------------------------

_Kind = Literal["number", "numbers", "range", "none"]
_KINDS: dict[str, dict[str, _Kind]] = {
    "model": dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "number"),
    "mesh": {"tp": "number", "pp": "number", "dp": "number"},
    "batch": {"microbatches": "number", "tokens": "number"},
    "resume": {"step": "number", "keep": "none"},
    "group": {"ranks": "numbers", "layers": "range"},
    "stream": {"dp": "numbers", "pp": "number"},
}


class _Fields:
    """The `key=value` words of one line, checked against the keys that it takes."""

    def __init__(
        self, tree: Tree[Token], kinds: dict[str, _Kind], budget: Budget, code: str
    ) -> None:
        self.values: dict[str, Tree[Token]] = {}
        self.budget = budget
        for attribute in _trees(tree):
            key = _tokens(attribute)[0]
            self._check_key(key, kinds)
            self._check_value(key, attribute, kinds[str(key)])
            if kinds[str(key)] != "none":
                (self.values[str(key)],) = _trees(attribute)
            else:
                self.values[str(key)] = attribute
        missing = [key for key in kinds if key not in self.values]
        if missing:
            end = len(code.rstrip()) + 1
            names = ", ".join(f"`{key}=`" for key in missing)
            raise LineError(end, end + 1, f"this line lacks {names}", code="RHP003")

    def _check_key(self, key: Token, kinds: dict[str, _Kind]) -> None:
        if key in self.values:
            _refuse(key, f"`{key}` is given twice in this line", code="RHP004")
        if key not in kinds:
            takes = ", ".join(f"`{name}`" for name in kinds)
            _refuse(
                key,
                f"unknown key {quote(str(key))}",
                hint=_did_you_mean(str(key), tuple(kinds)) or f"this line takes {takes}",
                code="RHP001",
            )

    def _check_value(self, key: Token, attribute: Tree[Token], kind: _Kind) -> None:
        trees = _trees(attribute)
        if kind == "none":
            if trees:
                first = _tokens(_trees(trees[0])[0])[0]
                _refuse(
                    first,
                    "`keep` can only be `none`: an interrupted iteration is redone in full",
                    code="RHP001",
                )
            return
        if not trees:
            none = _tokens(attribute)[1]
            _refuse(none, f"`{key}` needs a number", code="RHP001")
        if kind == "numbers":
            return
        intervals = _intervals(trees[0])
        if len(intervals) > 1:
            _refuse(intervals[1].token, f"`{key}` takes one {kind}, not a list", code="RHP001")
        if kind == "number" and len(_tokens(_trees(trees[0])[0])) > 1:
            _refuse(intervals[0].token, f"`{key}` takes one number, not a range", code="RHP001")

    def number(self, key: str) -> int:
        return _intervals(self.values[key])[0].first

    def numbers(self, key: str) -> tuple[int, ...]:
        return _listed(self.values[key], self.budget)

    def layers(self) -> LayerRange:
        first, last, _ = _intervals(self.values["layers"])[0]
        return LayerRange(first, last)


def _build(keyword: str, tree: Tree[Token], budget: Budget, code: str) -> Statement:
    """The statement that starts with `keyword` and was parsed to `tree`."""
    if keyword in _KINDS:
        return _build_keyed(keyword, tree, _Fields(tree, _KINDS[keyword], budget, code))
    match keyword:
        case "plan":
            return Version(_number(_tokens(tree)[0]))
        case "order":
            return Order(str(_tokens(tree)[0]))
        case "memory":
            return Memory(_size(_tokens(tree)[0]))
        case "standby":
            return Standby(_listed(_trees(tree)[0], budget))
        case "lost":
            return Lost(_listed(_trees(tree)[0], budget))
        case _:
            assert keyword == "reconfigure"
            return ReconfigureHead()


def _build_keyed(keyword: str, tree: Tree[Token], fields: _Fields) -> Statement:
    match keyword:
        case "group":
            place = _place(_tokens(tree)[0])
            return Group(
                replica=place.replica,
                pp=place.pp,
                ranks=fields.numbers("ranks"),
                layers=(fields.layers(),),
            )
        case "stream":
            return StreamHead(fields.numbers("dp"), fields.number("pp"))
        case "resume":
            return Resume(step=fields.number("step"))
        case "model":
            numbers = {key: fields.number(key) for key in _KINDS["model"]}
            return ModelShape(name=str(_tokens(tree)[0]), **numbers)
        case "mesh":
            return Mesh(**{key: fields.number(key) for key in _KINDS["mesh"]})
        case _:
            assert keyword == "batch"
            return Batch(**{key: fields.number(key) for key in _KINDS["batch"]})


def _size(token: Token) -> int:
    digits, unit = re.fullmatch(r"([0-9]+)([KMG]iB)?", str(token)).groups()  # pyright: ignore[reportOptionalMemberAccess] -- the terminal has this shape
    if len(digits) > 15:
        _refuse(token, f"the size {quote(str(token))} is too large", code="RHP006")
    return int(digits) * (_UNITS[unit] if unit else 1)


# --- errors ----------------------------------------------------------------------------------


def _did_you_mean(word: str, known: tuple[str, ...]) -> str | None:
    near = difflib.get_close_matches(word[:40], known, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else None


def _check_first_word(code: str, known: tuple[str, ...], what: str) -> None:
    word = code.split(None, 1)[0]
    if word in known:
        return
    column = code.index(word) + 1
    hint = _other_place(word) or _did_you_mean(word, known)
    joined = re.fullmatch(r"([A-Za-z_]+?)([0-9][0-9@]*)", word)
    if joined is not None and joined[1] in known:
        hint = f"put a blank before the number: `{joined[1]} {joined[2]}`"
    elif hint is None:
        hint = _list_of(known)
    raise LineError(column, column + len(word), f"unknown {what} {quote(word)}", hint=hint)


def _other_place(word: str) -> str | None:
    """Where a word that is known elsewhere belongs."""
    if word in BODY_WORDS:
        return f"`{word}` is an instruction; it belongs inside a `stream` block"
    if word in RESHARD_WORDS:
        return "`reshard` belongs inside the `reconfigure` block"
    if word in STATEMENT_WORDS:
        return f"`{word}` belongs outside the block; is a `}}` missing above?"
    return None


def _list_of(known: tuple[str, ...]) -> str:
    return "one of " + ", ".join(f"`{word}`" for word in known)


def _in_our_words(error: UnexpectedInput, code: str) -> LineError:
    """A lark error as ours: where, what was found, what may stand there."""
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        token = cast(Token, error.token)  # pyright: ignore[reportUnknownMemberType] -- lark does not type it
        column = len(code.rstrip()) + 1 if token.type == "$END" else _column(token)
    else:
        assert isinstance(error, UnexpectedCharacters)
        expected, column = set(error.allowed or ()), error.column
    words = [text for name, text in _TERMINALS.items() if name in expected]
    wanted = f"expected {' or '.join(words)}" if words else "nothing may follow here"
    found = re.match(r"\w+|\S", code[column - 1 :])
    if found is None:
        return LineError(column, column + 1, f"{wanted}, but the line ends")
    return LineError(column, column + found.end(), f"{wanted}, but found {quote(found.group())}")
