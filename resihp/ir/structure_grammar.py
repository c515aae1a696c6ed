"""Lines and blocks of any text: by the grammar, or line by line where the grammar refuses.

The grammar's `file` rule is the definition. When it refuses, `_Scan` walks the lines, finds every
fault of the block structure and still returns the lines that can be read, so that one run reports
faults of all kinds.
"""

from __future__ import annotations

import re

from lark import Token, Tree
from lark.exceptions import UnexpectedInput

from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.levels import BODY_WORDS, SOURCE_WORDS, STATEMENT_WORDS
from resihp.ir.lines import BLANKS, MAX_ERRORS, code_of
from resihp.ir.structure import Block
from resihp.ir.trees import parse_tree

__all__ = ["split_by_grammar"]

_BLANK_OR_COMMENT = re.compile(r"[ \t]*(?:#[^\n]*)?")


def split_by_grammar(text: str) -> tuple[list[Block], list[Diagnostic]]:
    """The lines and blocks of `text`, and the faults of its block structure."""
    try:
        tree = parse_tree(text, "file")
    except UnexpectedInput:
        blocks, faults = _Scan().run(text)
        assert faults, "the grammar refuses the structure, the scan finds nothing wrong"
        return blocks, faults
    blocks: list[Block] = []
    faults: list[Diagnostic] = []
    for line in tree.children:
        assert isinstance(line, Tree)
        tokens = [token for token in line.children if isinstance(token, Token)]
        if tokens:
            blocks.append(_block(tokens))
    for block in blocks:
        faults.extend(_loose_text(block))
    return blocks, faults


def _block(tokens: list[Token]) -> Block:
    head = tokens[0]
    assert head.line is not None
    assert head.column is not None
    text = str(head).rstrip(BLANKS)
    if len(tokens) == 1:
        return Block(head.line, head.column, text, head.line, None)
    brace = tokens[1].line
    assert brace is not None
    return Block(head.line, head.column, text, brace, str(tokens[1])[1:-1])


def _loose_text(block: Block) -> list[Diagnostic]:
    """An instruction on the line of `{` or `}`."""
    if block.body is None:
        return []
    faults: list[Diagnostic] = []
    first, newline, _ = block.body.partition("\n")
    last = block.body.rpartition("\n")[2]
    if not _BLANK_OR_COMMENT.fullmatch(first):
        message = "the first instruction of a block starts on the line after `{`"
        column = block.column + len(block.head)
        faults.append(_fault(Span(block.body_line, column, column + 1), message))
    elif not newline:
        message = "`}` stands on a line of its own"
        column = block.column + len(block.head)
        faults.append(_fault(Span(block.body_line, column, column + 1), message))
    elif last.strip(BLANKS):
        line = block.body_line + block.body.count("\n")
        message = "`}` stands on a line of its own"
        faults.append(_fault(Span(line, len(last) + 1, len(last) + 2), message))
    return faults


def _fault(span: Span, message: str, related: tuple[Related, ...] = ()) -> Diagnostic:
    return Diagnostic(code="RHP005", message=message, span=span, related=related)


class _Scan:
    """Block structure of a text that the grammar refuses, line by line."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.faults: list[Diagnostic] = []
        self.open: Block | None = None
        self.body: list[str] = []

    def run(self, text: str) -> tuple[list[Block], list[Diagnostic]]:
        for number, line in enumerate(text.split("\n"), start=1):
            code = code_of(line)
            if self.open is not None and _starts_statement(code):
                self._fault(
                    number,
                    code,
                    code.strip(BLANKS)[:1],
                    "the block above is not closed: a `}` is missing before this line",
                )
                self._close()
            if self.open is None:
                self._outside(number, code)
            else:
                self._inside(number, code)
            if len(self.faults) >= MAX_ERRORS:
                return self.blocks, self.faults
        if self.open is not None:
            span = Span(self.open.line, self.open.column, self.open.column + len(self.open.head))
            self.faults.append(_fault(span, "this block is never closed: `}` is missing"))
            self._close()
        return self.blocks, self.faults

    def _outside(self, number: int, code: str) -> None:
        head, brace, rest = code.partition("{")
        text = head.strip(BLANKS)
        column = len(head) - len(head.lstrip(BLANKS)) + 1
        if "}" in head:
            self._fault(number, code, "}", "this `}` closes no block")
        elif brace and not text:
            self._fault(number, code, "{", "`{` ends the line of the block's head")
        elif brace:
            if rest.strip(BLANKS):
                self._fault(number, code, rest.strip(BLANKS), "nothing may follow `{` on its line")
            self.open = Block(number, column, text, number, "")
            self.body = [""]
            if "}" in rest:
                self._close()
        elif text:
            self.blocks.append(Block(number, column, text, number, None))

    def _inside(self, number: int, code: str) -> None:
        if "{" in code:
            self._fault(number, code, "{", "a block cannot open inside a block")
            self.body.append("")
        elif code.strip(BLANKS) == "}":
            self._close()
        elif "}" in code:
            self._fault(number, code, "}", "`}` stands on a line of its own")
            self.body.append("")
            self._close()
        else:
            self.body.append(code)

    def _close(self) -> None:
        assert self.open is not None
        self.blocks.append(self.open._replace(body="\n".join([*self.body, ""])))
        self.open = None

    def _fault(self, number: int, code: str, at: str, message: str) -> None:
        column = code.index(at) + 1
        related: tuple[Related, ...] = ()
        if self.open is not None:
            span = Span(self.open.line, self.open.column, self.open.column + len(self.open.head))
            related = (Related("the block opens here", span),)
        self.faults.append(_fault(Span(number, column, column + max(len(at), 1)), message, related))


def _starts_statement(code: str) -> bool:
    word = code.strip("{ \t").split(None, 1)[:1]
    if not word or word[0] in BODY_WORDS or word[0] in SOURCE_WORDS:
        return False
    return word[0] in STATEMENT_WORDS
