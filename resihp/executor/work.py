"""What instructions do, as the interpreter sees it: the interpreter only orders.

An implementation is made for one generation of one rank: training (`resihp.executor.training`),
emulation, or a toy of the tests. A **payload** is whatever it computes and hands on: the
interpreter carries payloads between methods and the wire and never looks inside.

A rank may run several stages; `stage` is always the number in the whole model. The interpreter
calls F, B and W of a (stage, key) in this order, everything of the compute stream in the order of
the program, everything of the communication stream too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from resihp.executor.model import Key
from resihp.ir.program import TensorType
from resihp.wire.messages import StepRecord

__all__ = ["Payload", "Work"]

Payload = Any
"""What crosses stages: a tensor in training."""


class Work(Protocol):
    """Every method says where it runs: on a stream, or on the event loop, where it must be cheap.

    An error of any method ends the iteration; `CommError` or `PeerLost` where a peer is at fault.
    """

    def begin(self, step: int) -> None:
        """Loop: iteration `step` starts; nothing of an earlier one is left."""
        ...

    def forward(self, stage: int, key: Key, x: Payload | None) -> Payload | None:
        """Compute, F: `x` is None exactly on stage 0, the result exactly on the last stage."""
        ...

    def backward_input(self, stage: int, key: Key, dy: Payload | None) -> Payload | None:
        """Compute, B: `dy` is None exactly on the last stage, the result exactly on stage 0."""
        ...

    def backward_weight(self, stage: int, key: Key) -> None:
        """Compute, W: add this micro-batch to the stage's gradient sum."""
        ...

    def num_bytes(self, tensor: TensorType) -> int:
        """Size of one message of the plan's type as the wire carries it. Loop, once per program."""
        ...

    def chunk(self, payload: Payload, chunk: int, num_chunks: int) -> Payload:
        """What a send posts: chunk `chunk` of `num_chunks` along the tokens, or the whole.

        On whichever thread the wire runs it: must be cheap, a view.
        """
        ...

    def arrived(self, raw: Any, num_chunks: int) -> Payload:
        """The payload in a received message, one of `num_chunks` chunks; no copy.

        On the stream that uses it. CommError where it is not what the plan says.
        """
        ...

    def gather(self, stage: int, chunks: Sequence[Payload]) -> Payload:
        """Comm: the whole tensor from this member's chunks, by an all-gather over the TP group."""
        ...

    def reduce(self, stage: int) -> None:
        """Comm, REDUCE_GRADS: sum the stage's gradients over copies and replicas."""
        ...

    def vote(self) -> None:
        """Comm, first part of STEP: tied gradients summed, norms and losses exchanged."""
        ...

    def apply(self) -> None:
        """Compute, second part of STEP: update the parameters, or skip as all members do."""
        ...

    def record(self) -> StepRecord:
        """Loop, after `apply`: what the vote said."""
        ...

    def discard(self) -> None:
        """Loop, both streams idle: drop everything of the iteration that was begun."""
        ...
