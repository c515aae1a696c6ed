"""Transports that progress can be proved under, by name.

"Free of deadlock" means nothing without saying how messages queue. All models have this in common:

* A stream runs its instructions in order. Members of a TP group run the same stream, and F, B, BW
  and the gathers are rendezvous of all members, so they advance as one; `reduce_grads` is a
  rendezvous of all groups of its stage, `step` of all groups.
* A send is **posted** when the stream reaches it: the tensor is there, and the stream goes on
  (`eager` is the exception). A receive is posted when the stream reaches it, and the stream goes
  on. The stream waits for the tensor where it is needed: at the gather of that tensor, or else
  at the F, B or BW that uses it. Two overlapped computations start together, once the inputs of
  both are there.
* All that one group sends to another, activations and gradients of all stages, goes one way, in
  one order. Between two stages of one group nothing is sent.
* Computing takes finite time, and what may move does.

The models differ in what a posted transfer waits for:

`edge`
    One FIFO per directed rank pair, of any length. A tensor arrives once its send is posted,
    whether or not its receive is. (That receives take what was sent for them is the channel
    order check, RHP412.)
`pair`
    One FIFO per unordered rank pair, both directions in it, and each of the two ranks lists its
    sends and receives there as it posts them. A transfer ends when it is at the head of both
    ranks' lists; then it leaves both.
`rank`
    One FIFO per rank: the same, with one list per rank for all its transfers.
`eager=BYTES`
    As `edge`, but each directed rank pair buffers only BYTES. A message is *taken* when its
    receive, and the receives of all messages before it on this pair, are posted. A send blocks
    its stream until it is taken itself, or until it and the messages before it that are not
    taken fit in BYTES together. `eager=0` is the blocking send. The bytes of a whole tensor come
    from the facts, or are tokens * hidden * 4; a chunk has its share.

What `rank` accepts `pair` accepts, and `edge` too; what `eager` accepts, `eager` with a larger
buffer accepts, and `edge` too. No more holds in general. Where ranks pass tensors around in a
loop, one list per rank ties together transfers that lists per pair keep apart. And a blocking
send may hold up the `reduce_grads` of another stage, where a posted one does not. Only where
every group runs one stage, micro-batches stay in their replica and nothing is transferred after
`reduce_grads` do `rank` and `pair` accept the same, and `eager=0` accepts it too.

Between TP degrees each member takes part in every transfer of its group, in the same order, so
queues of ranks look alike for all members and a proof for groups is one for ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from resihp.errors import UserError
from resihp.ir.statements import read_size, spell_size

__all__ = ["EDGE", "TRANSPORTS", "Transport", "parse_transport"]

TRANSPORTS = ("edge", "pair", "rank", "eager=BYTES")
"""How transports are written."""

_SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB)?")


class Transport(NamedTuple):
    """One of the models; `eager_bytes` is the buffer of a directed rank pair under `eager`."""

    kind: str
    """`edge`, `pair`, `rank` or `eager`."""
    eager_bytes: int = 0

    def __str__(self) -> str:
        return f"eager={spell_size(self.eager_bytes)}" if self.kind == "eager" else self.kind


EDGE = Transport("edge")


def parse_transport(text: str) -> Transport:
    """The transport written as `edge`, `pair`, `rank`, `eager=4096` or `eager=4MiB`.

    Raises `UserError` for anything else.
    """
    if text in TRANSPORTS[:3]:
        return Transport(text)
    kind, _, size = text.partition("=")
    if kind in TRANSPORTS:
        raise UserError(f"transport `{text}`: `{kind}` takes no value")
    if kind != "eager":
        known = ", ".join(f"`{name}`" for name in TRANSPORTS)
        raise UserError(f"unknown transport `{text}`; the verifier knows {known}")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise UserError(
            f"transport `{text}`: the buffer of a rank pair is a whole number of bytes, KiB, MiB "
            "or GiB, such as `eager=65536` or `eager=4MiB`"
        )
    return Transport("eager", read_size(match[1], match[2]))
