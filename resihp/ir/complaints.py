"""Why the grammar refuses a line, in our words: what was found, what may stand there, what to do.

lark knows the place and the terminals that would have fitted. Where a line shows what its author
meant (the arrow of a receive on a send, the stage in the wrong brackets), that is what is said.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from resihp.ir.levels import BODY_WORDS, place_of
from resihp.ir.lines import BLANKS, LineError, did_you_mean, list_of, quote
from resihp.ir.model import Op

if TYPE_CHECKING:
    from collections.abc import Collection, Set

__all__ = ["check_first_word", "misfit"]

_TERMINALS = {
    "COMPUTE": "F, B, W or BW",
    "INT": "a number",
    "NAME": "a name",
    "PLACE": "a group such as `dp0.pp1`",
    "REPLICA": "a replica such as `dp1`",
    "SIZE": "a size such as `16GiB`",
    "TRANSPORT": "`edge`, `pair`, `rank` or `eager=BYTES`",
    "PRECISION": "`fp32` or `bf16`",
    "TENSOR": "a tensor such as `128x256xf32`",
    "KEY": "`key=value`",
    "NONE": "`none`",
    "_EQUALS": "`=`",
    "_COMMA": "`,`",
    "_COLON": "`:` and a chunk",
    "_SLASH": "`/` and the number of chunks",
    "_DOTS": "`..`",
    "_OPEN": "`[` and a stage",
    "_CLOSE": "`]`",
    "_AT": "`@` and a replica",
    "_TO": "`->`",
    "_FROM": "`<-`",
    "_AND": "`&`",
    "$END": "the end of the line",
}
_SENDS = (Op.SEND_ACT, Op.SEND_GRAD)
_RECVS = (Op.RECV_ACT, Op.RECV_GRAD)
_WORD = re.compile(r"->|<-|dp[0-9]+\.pp[0-9]+|\w+|[^ \t]")


_STAGE = ("_OPEN", True)


_TORCH = {
    "F": "F",
    "I": "B",
    "W": "W",
    "B": "BW",
    "SEND_F": "send_act",
    "RECV_F": "recv_act",
    "SEND_B": "send_grad",
    "RECV_B": "recv_grad",
    "UNSHARD": "gather_params",
    "RESHARD": "free_params",
    "REDUCE_GRAD": "reduce_grads",
}
"""What torch's pipelining CSV calls our instructions."""


def check_first_word(code: str, known: Collection[str], what: str) -> None:
    """Refuse a line whose first word is none of `known`: it is no `what`."""
    found = re.search(r"\w+|[^ \t]+", code)
    assert found is not None, "a blank line says nothing"
    word = found.group()
    if word not in known:
        hint = _advice(word, known)
        message = f"unknown {what} {quote(word)}"
        raise LineError(found.start() + 1, found.end() + 1, message, hint=hint)


def _advice(word: str, known: Collection[str]) -> str:
    """What the author of an unknown first word may have meant."""
    joined = re.fullmatch(r"([A-Za-z_]+?)([0-9]+)", word)
    if joined is not None and joined[1] in known:
        return f"put a blank before the number: `{joined[1]} {joined[2][:10]}`"
    cell = re.fullmatch(r"([0-9]*)([A-Z_]+)([0-9]*)", word)
    if cell is not None and cell[2] in _TORCH and "F" in known:
        stage = f"[{cell[1][:10]}]" if cell[1] else ""
        ours = f"{_TORCH[cell[2]]}{stage} {cell[3][:10]}".rstrip()
        return f"torch's {quote(word)} is `{ours}` here"
    return place_of(word) or did_you_mean(word, known) or list_of(known)


class _At(NamedTuple):
    """What stands where the line stops to make sense."""

    found: str
    before: str
    """The line up to there."""
    wanted: Set[str]
    """Terminals that would have fitted."""
    op: Op | None
    """The instruction that it belongs to; None in lines that are no instruction."""


def misfit(code: str, column: int, wanted: Set[str], *, instruction: bool) -> LineError:
    """The error of a line that the grammar refuses at `column`, where `wanted` would fit."""
    found = _WORD.match(code, column - 1)
    expected = _expected(wanted)
    if found is None:
        return LineError(column, column + 1, f"{expected}, but the line ends")
    before = code[: column - 1]
    at = _At(found.group(), before, wanted, _op_of(before) if instruction else None)
    message = _message(at) or f"{expected}, but found {quote(at.found)}"
    return LineError(column, found.end() + 1, message, hint=_hint(at))


def _expected(wanted: Set[str]) -> str:
    # A stage is never needed to go on: where a number fits, that is what is missing.
    names = [name for name in _TERMINALS if name in wanted and (name, "INT" in wanted) != _STAGE]
    *first, last = [_TERMINALS[name] for name in names] or [""]
    if not last:
        return "nothing may follow here"
    return f"expected {', '.join(first)} or {last}" if first else f"expected {last}"


def _op_of(before: str) -> Op | None:
    words = [word for word in re.findall(r"[A-Za-z_]+", before) if word in BODY_WORDS]
    return BODY_WORDS[words[-1]] if words else None


def _message(at: _At) -> str | None:
    """What is wrong, where it is a thing of instructions rather than of letters."""
    if at.op is None or "INT" in at.wanted:
        return None
    match at.found:
        case "->" | "<-" if at.op not in (*_SENDS, *_RECVS):
            takes = "sends take `->`" if at.found == "->" else "receives take `<-`"
            return f"only {takes}, not `{at.op.mnemonic}`"
        case "<-" if at.op in _SENDS:
            return "a send says where the tensor goes, with `->`"
        case "->" if at.op in _RECVS:
            return "a receive says where the tensor comes from, with `<-`"
        case "&" if not at.op.is_compute:
            return f"only F, B, W and BW make pairs, not `{at.op.mnemonic}`"
        case "&" if "&" in at.before and "COMPUTE" not in at.wanted:
            return "a pair has two instructions, no more"
        case "[" if at.op is Op.STEP:
            return "`step` is for all stages: it takes none"
        case word if word.isdigit() and "[" in at.before and not at.op.has_micro_batch:
            return f"`{at.op.mnemonic}` is for all micro-batches: it takes none"
        case word if "COMPUTE" in at.wanted and word in BODY_WORDS:
            return f"only F, B, W and BW make pairs, not `{word}`"
        case _:
            return None


def _hint(at: _At) -> str | None:
    if at.op is None:
        return _hint_outside(at)
    word, found = at.op.mnemonic, at.found
    if found in ("(", "<", "[") and at.op.has_stage:
        return f"the stage stands right after the instruction, in `[ ]`: `{word}[2]`"
    if found.isdigit() and "_OPEN" in at.wanted and "INT" not in at.wanted:
        return f"a stage stands in `[ ]`: `{word}[{found[:10]}]`"
    if found.isdigit() and "REPLICA" in at.wanted:
        return f"a plan names the replica at the other end, not its ranks: `dp{found[:10]}`"
    if re.match("dp[0-9]", found) and at.before.rstrip(BLANKS).endswith(("->", "<-")):
        return "a program names the rank at the other end"
    if found == "." and re.search("dp[0-9]+$", at.before):
        return "the position follows from the stage; name the replica only"
    if "COMPUTE" not in at.wanted and (found in (";", ",") or found in BODY_WORDS):
        return "one instruction a line, or two that overlap with `&` between them"
    return None


def _hint_outside(at: _At) -> str | None:
    """Advice on a line that is no instruction."""
    if at.before.split() == ["schedule"]:
        return f"how the streams were ordered is said by `order {at.found}`"
    if at.found in ("-", ":") and "_DOTS" in at.wanted:
        return "a range is written with two dots: `0..3`"
    return None
