"""Reading one line with the lark grammar."""

from __future__ import annotations

import re
from typing import cast

from lark import Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from resihp.ir.complaints import check_first_word, misfit
from resihp.ir.fields import KEYS, Fields
from resihp.ir.levels import BODY_WORDS, SOURCE_WORDS, STATEMENT_WORDS
from resihp.ir.lines import BLANKS, Budget, quote
from resihp.ir.model import (
    Batch,
    Group,
    Instr,
    Level,
    Load,
    Mesh,
    ModelShape,
    Move,
    Precision,
    Reshard,
    Restore,
    Resume,
    Source,
)
from resihp.ir.program import TensorType, Transfer
from resihp.ir.statements import (
    Lost,
    Memory,
    Order,
    PrecisionName,
    ProgramLine,
    RankHead,
    Recompute,
    ReconfigureHead,
    Returned,
    RunHead,
    Standby,
    Statement,
    StreamHead,
    TransportName,
    Version,
    read_size,
)
from resihp.ir.transport import Transport
from resihp.ir.trees import Start, listed, number, parse_tree, place, refuse, tokens, trees

__all__ = [
    "read_instruction",
    "read_program_line",
    "read_source",
    "read_statement",
]

_SIZE = re.compile(r"([0-9]+)(KiB|MiB|GiB)?")


def read_statement(code: str, budget: Budget) -> Statement:
    """The statement of a line outside a block (comment already cut off)."""
    check_first_word(code, STATEMENT_WORDS, "statement")
    (tree,) = trees(_parse(code, "statement"))
    if tree.data in KEYS:
        return _keyed(tree, Fields(tree.data, tree, budget, code))
    return _unkeyed(tree, budget)


def read_source(code: str, budget: Budget) -> Source:
    """The line of a `reconfigure` block."""
    check_first_word(code, SOURCE_WORDS, "line of a `reconfigure` block")
    tree = _parse(code, "source")
    keyword, *ends = tokens(tree)
    fields = Fields(str(keyword), tree, budget, code)
    (layers,) = fields.ranges("layers")
    match str(keyword):
        case "reshard":
            return Reshard(layers=layers, source=place(ends[0]), target=place(ends[1]))
        case "move":
            return Move(layers=layers, source=number(ends[0]), target=number(ends[1]))
        case "restore":
            return Restore(
                layers=layers,
                source=number(ends[0]),
                giver=fields.number("at"),
                target=place(ends[1]),
            )
        case _:
            return Load(layers=layers, step=fields.number("step"), target=place(ends[0]))


def read_instruction(code: str) -> tuple[Instr, ...]:
    """The instruction of a line of a `stream` block, or both of an overlapped pair."""
    check_first_word(code, tuple(BODY_WORDS), "instruction")
    return _instructions(_parse(code, "instruction"))


def read_program_line(code: str) -> tuple[ProgramLine, ...]:
    """The instruction of a line of a `run` block, or both of an overlapped pair."""
    check_first_word(code, tuple(BODY_WORDS), "instruction")
    tree = _parse(code, "program_instruction")
    peers = [peer for rule in trees(tree) if rule.data == "peers" for peer in trees(rule)]
    transfers = tuple(map(_transfer, peers))
    tensor = next((_tensor(token) for token in tokens(tree) if token.type == "TENSOR"), None)
    return tuple(ProgramLine(instr, transfers, tensor) for instr in _instructions(tree))


# --- from trees to data ----------------------------------------------------------------------


def _parse(code: str, start: Start) -> Tree[Token]:
    try:
        return parse_tree(code, start)
    except UnexpectedInput as error:
        instruction = start in ("instruction", "program_instruction")
        raise misfit(code, *_misfit_at(error, code), instruction=instruction) from None


def _misfit_at(error: UnexpectedInput, code: str) -> tuple[int, set[str]]:
    """The column where a line does not fit, and the terminals that would."""
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        token = cast(Token, error.token)  # pyright: ignore[reportUnknownMemberType] -- lark does not type it
        if token.type == "$END":
            return len(code.rstrip(BLANKS)) + 1, expected
        assert token.column is not None
        return token.column, expected
    assert isinstance(error, UnexpectedCharacters)
    return error.column, set(error.allowed or ())


def _instructions(tree: Tree[Token]) -> tuple[Instr, ...]:
    """One instruction, or the two of a pair."""
    computes = [rule for rule in trees(tree) if rule.data == "compute"]
    if not computes:
        return (_instr(tree),)
    paired = len(computes) > 1
    first = _instr(computes[0], paired=paired)
    return (first, _instr(computes[1])) if paired else (first,)


def _instr(tree: Tree[Token], *, paired: bool = False) -> Instr:
    stage = peer = microbatch = home = None
    for rule in trees(tree):
        if rule.data == "stage":
            stage = number(tokens(rule)[0])
        elif rule.data == "microbatch":
            numbers = [number(token) for token in tokens(rule)]
            microbatch, home = numbers[0], numbers[1] if len(numbers) > 1 else None
    for token in tokens(tree):
        if token.type == "REPLICA":
            peer = number(token.update(value=token[2:]))
    return Instr(BODY_WORDS[str(tokens(tree)[0])], microbatch, home, stage, peer, paired)


def _transfer(peer: Tree[Token]) -> Transfer:
    numbers = [number(token) for token in tokens(peer)]
    return Transfer(*numbers) if len(numbers) == 3 else Transfer(numbers[0], 0, 1)


def _tensor(token: Token) -> TensorType:
    tokens, hidden, element = str(token).split("x")
    return TensorType(
        number(token.update(value=tokens)), number(token.update(value=hidden)), element
    )


def _keyed(tree: Tree[Token], fields: Fields) -> Statement:
    """The statement of a line with `key=value` words."""
    match tree.data:
        case "group":
            replica, pp = place(tokens(tree)[0])
            ranks, layers = fields.numbers("ranks"), fields.ranges("layers")
            return Group(replica=replica, pp=pp, ranks=ranks, layers=layers)
        case "stream":
            return StreamHead(fields.numbers("dp"), fields.number("pp"))
        case "resume":
            return Resume(step=fields.number("step"), keep=fields.kept("keep"))
        case "model":
            numbers = {key: fields.number(key) for key in KEYS["model"]}
            return ModelShape(name=str(tokens(tree)[0]), **numbers)
        case "mesh":
            return Mesh(**{key: fields.number(key) for key in KEYS["mesh"]})
        case "batch":
            return Batch(**{key: fields.number(key) for key in KEYS["batch"]})
        case _:
            assert tree.data == "rank"
            return RankHead(
                rank=number(tokens(tree)[0]),
                group=fields.place("group"),
                member=fields.number("member"),
                tp=fields.number("tp"),
                layers=fields.ranges("layers"),
                stages=fields.numbers("stages"),
                num_stages=fields.number("of"),
            )


def _unkeyed(tree: Tree[Token], budget: Budget) -> Statement:
    """The statement of a line without `key=value` words."""
    match tree.data:
        case "order":
            return Order(str(tokens(tree)[0]))
        case "memory":
            return Memory(_size(tokens(tree)[0], str(tokens(tree)[0])))
        case "transport":
            return TransportName(_transport(tokens(tree)[0]))
        case "precision":
            return PrecisionName(cast("Precision", str(tokens(tree)[0])))
        case "recompute":
            return Recompute(listed(trees(tree)[0], budget))
        case "standby":
            return Standby(listed(trees(tree)[0], budget))
        case "lost":
            return Lost(listed(trees(tree)[0], budget))
        case "returned":
            return Returned(listed(trees(tree)[0], budget))
        case "reconfigure":
            return ReconfigureHead()
        case "run":
            return RunHead()
        case _:
            assert tree.data == "version"
            level, version = tokens(tree)
            return Version(Level(str(level)), number(version))


def _size(token: Token, size: str) -> int:
    found = _SIZE.fullmatch(size)
    assert found is not None, "the terminal has this shape"
    if len(found[1]) > 15:
        refuse(token, f"the size {quote(size)} is too large", code="RHP006")
    return read_size(found[1], found[2])


def _transport(token: Token) -> str:
    name, equals, size = (part.strip() for part in str(token).partition("="))
    return str(Transport(name, _size(token, size))) if equals else name
