"""Trees of the lark grammar: making them, and the numbers and names in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, NoReturn

from lark import Lark, Token, Tree

from resihp.ir.lines import MAX_LISTED, MAX_NUMBER, Budget, LineError, quote
from resihp.ir.model import GroupName, MicroBatch

__all__ = [
    "STARTS",
    "Interval",
    "Start",
    "intervals",
    "listed",
    "micro_batches",
    "number",
    "parse_tree",
    "place",
    "refuse",
    "tokens",
    "trees",
]

Start = Literal["file", "statement", "source", "instruction", "program_instruction"]
STARTS: tuple[Start, ...] = ("file", "statement", "source", "instruction", "program_instruction")


@cache
def _grammar() -> Lark:
    """The language: `grammar.lark` as an LALR parser with one start symbol per kind of text."""
    text = resources.files("resihp.ir").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(text, parser="lalr", start=list(STARTS), maybe_placeholders=False)


def parse_tree(text: str, start: Start) -> Tree[Token]:
    """`text` as a tree of the grammar's rule `start`; raises lark's `UnexpectedInput`."""
    return _grammar().parse(text, start=start)  # pyright: ignore[reportUnknownMemberType] -- lark leaves its text type open


def trees(tree: Tree[Token]) -> list[Tree[Token]]:
    """The children of `tree` that are trees."""
    return [child for child in tree.children if isinstance(child, Tree)]


def tokens(tree: Tree[Token]) -> list[Token]:
    """The children of `tree` that are tokens."""
    return [child for child in tree.children if isinstance(child, Token)]


def refuse(
    token: Token, message: str, *, hint: str | None = None, code: str = "RHP001"
) -> NoReturn:
    """Say that `token` is what is wrong with the line."""
    assert token.column is not None
    raise LineError(token.column, token.column + len(token), message, hint=hint, code=code)


def number(token: Token) -> int:
    """The value of a number; refuses what is larger than `MAX_NUMBER`."""
    # Length first: int() of a million digits is slow.
    digits = str(token)
    if len(digits) > 10 or int(digits) > MAX_NUMBER:
        refuse(token, f"the number {quote(digits)} is larger than {MAX_NUMBER}", code="RHP006")
    return int(digits)


def place(token: Token) -> GroupName:
    """The group that `dp0.pp1` names."""
    replica, pp = str(token)[2:].split(".pp")
    if max(len(replica), len(pp)) > 9:
        refuse(token, f"the numbers of {quote(str(token))} are too large", code="RHP006")
    return GroupName(int(replica), int(pp))


class Interval(NamedTuple):
    """`first..last`, or one number; `token` is where it starts."""

    first: int
    last: int
    token: Token


def intervals(numbers: Tree[Token]) -> list[Interval]:
    """The intervals of a list; refuses one that runs backwards or has a home."""
    found = list(_with_homes(numbers))
    for _, home in found:
        if home is not None:
            refuse(home, "`@` and a replica belong to micro-batches alone")
    return [interval for interval, _ in found]


def micro_batches(numbers: Tree[Token], budget: Budget) -> tuple[MicroBatch, ...]:
    """The micro-batches of a list such as `0..3,2@1`, in its order; refuses as `listed` does."""
    found: list[MicroBatch] = []
    for (first, last, token), at in _with_homes(numbers):
        home = 0 if at is None else number(at)
        _take(budget, last - first + 1, token)
        found.extend(MicroBatch(home, each) for each in range(first, last + 1))
    return tuple(found)


def _with_homes(numbers: Tree[Token]) -> Iterator[tuple[Interval, Token | None]]:
    for tree in trees(numbers):
        ends = tokens(tree)
        first, last = number(ends[0]), number(ends[-1])
        if last < first:
            refuse(
                ends[0],
                f"the range {first}..{last} runs backwards",
                hint=f"write {last}..{first}",
            )
        homes = [tokens(home)[0] for home in trees(tree)]
        yield Interval(first, last, ends[0]), homes[0] if homes else None


def listed(numbers: Tree[Token], budget: Budget) -> tuple[int, ...]:
    """The numbers of a list, in its order; refuses what the budget does not allow."""
    found: list[int] = []
    for first, last, token in intervals(numbers):
        _take(budget, last - first + 1, token)
        found.extend(range(first, last + 1))
    return tuple(found)


def _take(budget: Budget, count: int, token: Token) -> None:
    """Numbers of a list that begins at `token`."""
    budget.numbers -= count
    if budget.numbers < 0:
        refuse(token, f"the lists of this text name more than {MAX_LISTED} numbers", code="RHP006")
