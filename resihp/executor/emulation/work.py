"""The work of an emulated device: it takes its time and knows which tensor it holds.

Nothing is computed, but what is handed on says what it is, and whoever gets another tensor than
it needs says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from resihp.errors import CommError
from resihp.executor.boundary import Agreement, Ask
from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import Clock
from resihp.executor.emulation.stream import EmulatedStream, Meeting
from resihp.executor.emulation.times import RankTimes
from resihp.executor.work import Key
from resihp.ir.model import Op
from resihp.ir.program import Program, TensorType
from resihp.wire.messages import StepRecord

__all__ = ["EmulatedTensor", "EmulatedWork", "Ledger", "Meetings"]

Meetings = Callable[[Tag, Sequence[int]], Meeting]
"""The rendezvous of some ranks under a tag (of an operation), the same for all of them."""


class Ledger(Protocol):
    """What keeps count of steps."""

    agreement: Agreement

    def vote_complete(self, record: StepRecord) -> None:
        """All members have come to the vote."""
        ...

    def apply(self) -> None:
        """The voted step is complete here."""
        ...


class EmulatedTensor(NamedTuple):
    """What crosses stages: an activation that `stage` made, or the gradient of its input."""

    is_gradient: bool
    stage: int
    key: Key
    chunk: int = 0
    num_chunks: int = 1

    def __str__(self) -> str:
        what = "gradient" if self.is_gradient else "activation"
        part = "" if self.num_chunks == 1 else f"chunk {self.chunk} of {self.num_chunks} of "
        number, home = self.key[1], self.key[0]
        return f"{part}the {what} of micro-batch {number}@{home} from stage {self.stage}"


class EmulatedWork:
    """`resihp.executor.work.Work` that computes nothing."""

    def __init__(
        self,
        program: Program,
        times: RankTimes,
        *,
        clock: Clock,
        compute: EmulatedStream,
        comm: EmulatedStream,
        meetings: Meetings,
        group: Sequence[int],
        holders: Mapping[int, Sequence[int]],
        ranks: Sequence[int],
        ledger: Ledger | None = None,
    ) -> None:
        """`group` are the ranks of the TP group, `holders` those of each stage, `ranks` all."""
        self._program = program
        self._times = times
        self._clock = clock
        self._compute = compute
        self._comm = comm
        self._meetings = meetings
        self._group = group
        self._holders = holders
        self._ranks = ranks
        self._ledger = ledger
        self._last_stage = program.num_stages - 1
        self._step = 0
        self._begin_ns = 0
        self._record: StepRecord | None = None
        self._vote: Meeting | None = None

    def begin(self, step: int) -> None:
        """See `Work`."""
        self._step = step
        self._begin_ns = self._clock.now_ns()
        self._record = None

    # --- compute

    def forward(self, stage: int, key: Key, x: Any) -> EmulatedTensor | None:
        """See `Work`. Members of a TP group sum activations, so they end together."""
        _expect(Op.F, stage, key, x, None if stage == 0 else EmulatedTensor(False, stage - 1, key))
        self._together(self._compute, Op.F, stage, key, self._times.of(Op.F, stage, key))
        return None if stage == self._last_stage else EmulatedTensor(False, stage, key)

    def backward_input(self, stage: int, key: Key, dy: Any) -> EmulatedTensor | None:
        """See `Work`."""
        last = stage == self._last_stage
        _expect(Op.B, stage, key, dy, None if last else EmulatedTensor(True, stage + 1, key))
        self._together(self._compute, Op.B, stage, key, self._times.of(Op.B, stage, key))
        return None if stage == 0 else EmulatedTensor(True, stage, key)

    def backward_weight(self, stage: int, key: Key) -> None:
        """See `Work`."""
        self._compute.take(self._times.of(Op.W, stage, key))

    def apply(self) -> None:
        """See `Work`. The vote is over now."""
        num_tokens = self._program.batch.tokens * self._program.batch.microbatches
        self._record = StepRecord(
            step=self._step,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            skipped=False,
            num_tokens=num_tokens * self._program.mesh.dp,
            samples=(),
            duration_s=(self._clock.now_ns() - self._begin_ns) * 1e-9,
            emulated=True,
        )
        if self._ledger is not None:
            assert self._vote is not None
            self._ledger.agreement.agree(Ask(self._vote.brought))
            self._ledger.vote_complete(self._record)
        self._compute.take(self._times.of(Op.STEP))

    # --- transfers

    def num_bytes(self, tensor: TensorType) -> int:
        """See `Work`."""
        return tensor.num_bytes

    def chunk(self, payload: EmulatedTensor, chunk: int, num_chunks: int) -> EmulatedTensor:
        """See `Work`."""
        return payload._replace(chunk=chunk, num_chunks=num_chunks)

    def arrived(self, raw: EmulatedTensor, num_chunks: int) -> EmulatedTensor:
        """See `Work`."""
        if raw.num_chunks != num_chunks:
            raise CommError(f"received {raw}, and the plan has it in {num_chunks} chunks")
        return raw

    def gather(self, stage: int, chunks: Sequence[EmulatedTensor]) -> EmulatedTensor:
        """See `Work`. Its time is that of the transfer, so here members only meet."""
        whole = chunks[0]._replace(chunk=0, num_chunks=1)
        num_chunks, degree = chunks[0].num_chunks, self._program.tp
        mine = [c for c in range(num_chunks) if c * degree // num_chunks == self._program.tp_index]
        expected = [whole._replace(chunk=chunk, num_chunks=num_chunks) for chunk in mine]
        if list(chunks) != expected:
            found = "; ".join(map(str, chunks))
            raise CommError(f"member {self._program.tp_index} of {degree} gathers {found}")
        op = Op.GATHER_GRAD if whole.is_gradient else Op.GATHER_ACT
        self._together(self._comm, op, stage, whole.key, 0)
        return whole

    # --- the end of the iteration

    def reduce(self, stage: int) -> None:
        """See `Work`."""
        meeting = self._meetings(self._tag(Op.REDUCE_GRADS, stage, (0, 0)), self._holders[stage])
        self._comm.meet(meeting, self._times.of(Op.REDUCE_GRADS, stage))

    def vote(self) -> None:
        """See `Work`."""
        self._vote = self._meetings(self._tag(Op.STEP, 0, (0, 0)), self._ranks)
        if self._ledger is not None:
            self._vote.bring(self._ledger.agreement.brought())
        self._comm.meet(self._vote, 0)

    def record(self) -> StepRecord:
        """See `Work`. Nothing was computed, so there is no loss."""
        assert self._record is not None
        if self._ledger is not None:
            self._ledger.apply()
        return self._record

    def discard(self) -> None:
        """See `Work`. Nothing is kept."""

    def _together(
        self, stream: EmulatedStream, op: Op, stage: int, key: Key, lasts_ns: int
    ) -> None:
        if self._program.tp == 1:
            stream.take(lasts_ns)
        else:
            stream.meet(self._meetings(self._tag(op, stage, key), self._group), lasts_ns)

    def _tag(self, op: Op, stage: int, key: Key) -> Tag:
        return Tag(int(op), self._step, stage, *key, 0)


def _expect(op: Op, stage: int, key: Key, found: Any, needed: EmulatedTensor | None) -> None:
    if found != needed:
        what = f"{op.mnemonic} {key[1]}@{key[0]} of stage {stage}"
        raise CommError(f"{what} needs {needed or 'nothing'} and got {found or 'nothing'}")
