"""What crosses stage boundaries: made, cut, sent, received, joined and used, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import COMPUTE, EDGES, Edge, Lane, MicroBatch, name_of
from resihp.ir.model import GroupName, Op
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.once import Work

__all__ = ["Matched", "check_dataflow"]


class Matched(NamedTuple):
    """The transfers of one channel that have both ends, as (micro-batch, send, receive)."""

    sender: Lane
    receiver: Lane
    edge: Edge
    pairs: list[tuple[MicroBatch, int, int]]


class _Crossing(NamedTuple):
    """One tensor on its way; indices are None where the instruction is missing."""

    edge: Edge
    micro_batch: MicroBatch
    sender: Lane
    receiver: Lane
    produce: int
    scatter: int | None
    send: int | None
    recv: int | None
    gather: int | None
    consume: int


def check_dataflow(
    parsed: Parsed, lanes: Mapping[GroupName, Lane], work: Work, findings: Findings
) -> list[Matched]:
    """RHP401 to RHP411, RHP413, RHP414. Returns what the channel order check needs."""
    check = _Check(parsed, work, findings)
    for lane in lanes.values():
        check.twice(lane)
        check.past_the_end(lane)
    check.replica_changes()
    matched: list[Matched] = []
    for name, sender in lanes.items():
        for edge in EDGES:
            receiver = lanes.get(GroupName(name.replica, name.pp + edge.stage_step))
            if receiver is not None:
                matched.append(check.channel(edge, sender, receiver))
    return matched


class _Check:
    def __init__(self, parsed: Parsed, work: Work, findings: Findings) -> None:
        self.parsed = parsed
        self.plan = parsed.plan
        self.work = work
        self.findings = findings

    def span(self, lane: Lane, index: int) -> Span:
        return self.parsed.streams[lane.stream].span(index)

    def text(self, lane: Lane, index: int) -> str:
        """The instruction as it is meant, such as `send_act 3@1`."""
        micro_batch = lane.micro_batches[index]
        assert micro_batch is not None
        return f"`{lane.body[index].op.mnemonic} {name_of(micro_batch, lane.name.replica)}`"

    def add(
        self,
        code: str,
        lane: Lane,
        index: int,
        message: str,
        related: tuple[Related, ...] = (),
        hint: str | None = None,
    ) -> None:
        self.findings.add(
            code,
            self.span(lane, index),
            message,
            related=related,
            hint=hint,
            replica=lane.name.replica,
        )

    def here(self, lane: Lane, index: int, what: str = "") -> Related:
        return Related(
            f"{self.text(lane, index)} of {lane.name} is here{what}", self.span(lane, index)
        )

    def twice(self, lane: Lane) -> None:
        """RHP403."""
        for index, first in lane.again:
            if lane.body[index].op not in COMPUTE:
                related = (Related("first here", self.span(lane, first)),)
                message = f"{self.text(lane, index)} stands twice in this stream"
                self.add("RHP403", lane, index, message, related)

    def past_the_end(self, lane: Lane) -> None:
        """RHP407."""
        stage = lane.name.pp
        refused: dict[Op, str] = {}
        for edge in EDGES:
            if not 0 <= stage + edge.stage_step < self.plan.mesh.pp:
                refused |= dict.fromkeys((edge.scatter, edge.send), "nobody to send to")
            if not 0 <= stage - edge.stage_step < self.plan.mesh.pp:
                refused |= dict.fromkeys((edge.recv, edge.gather), "nobody to receive from")
        if refused:
            which = "first" if stage == 0 else "last"
            for (op, _), index in lane.first.items():
                if op in refused:
                    message = (
                        f"{self.text(lane, index)}: stage {stage} is the {which}, it has "
                        f"{refused[op]} there"
                    )
                    self.add("RHP407", lane, index, message)

    def replica_changes(self) -> None:
        """RHP414."""
        for (stage, micro_batch), ops in self.work.places.items():
            following = self.work.places.get((stage + 1, micro_batch))
            if following is None or Op.F not in ops or Op.F not in following:
                continue
            here, there = following[Op.F], ops[Op.F]
            if here.lane.name.replica != there.lane.name.replica:
                self.add(
                    "RHP414",
                    here.lane,
                    here.position,
                    f"{self.text(*here)} runs on replica {here.lane.name.replica}, but stage "
                    f"{stage} ran on replica {there.lane.name.replica}",
                    (self.here(*there),),
                )

    def channel(self, edge: Edge, sender: Lane, receiver: Lane) -> Matched:
        """All tensors of one kind from `sender` to `receiver`."""
        matched = Matched(sender, receiver, edge, [])
        for micro_batch in _micro_batches(edge, sender, receiver):
            if self._is_broken(micro_batch, sender, receiver):
                continue
            crossing = self._crossing(edge, micro_batch, sender, receiver)
            if crossing is not None:
                self._check(crossing)
                if crossing.send is not None and crossing.recv is not None:
                    matched.pairs.append((micro_batch, crossing.send, crossing.recv))
        self._check_tokens(edge, sender, receiver)
        return matched

    def _is_broken(self, micro_batch: MicroBatch, *ends: Lane) -> bool:
        return any((lane.name.pp, micro_batch) in self.work.broken for lane in ends)

    def _crossing(
        self, edge: Edge, micro_batch: MicroBatch, sender: Lane, receiver: Lane
    ) -> _Crossing | None:
        """The tensor's way; None, reporting RHP413, where an end does not compute it."""
        produce = sender.find(edge.produce, micro_batch)
        consume = receiver.find(edge.consume, micro_batch)
        if produce is None or consume is None:
            if produce is None:
                self._stray(sender, (edge.scatter, edge.send), micro_batch)
            if consume is None:
                self._stray(receiver, (edge.recv, edge.gather), micro_batch)
            return None
        return _Crossing(
            edge,
            micro_batch,
            sender,
            receiver,
            produce,
            sender.first.get((edge.scatter, micro_batch)),
            sender.first.get((edge.send, micro_batch)),
            receiver.first.get((edge.recv, micro_batch)),
            receiver.first.get((edge.gather, micro_batch)),
            consume,
        )

    def _stray(self, lane: Lane, ops: tuple[Op, ...], micro_batch: MicroBatch) -> None:
        for op in ops:
            index = lane.first.get((op, micro_batch))
            if index is not None:
                what = name_of(micro_batch, lane.name.replica)
                message = f"{self.text(lane, index)}: {lane.name} does not compute {what}"
                self.add("RHP413", lane, index, message)

    def _check(self, crossing: _Crossing) -> None:
        edge, sender, receiver = crossing.edge, crossing.sender, crossing.receiver
        number = name_of(crossing.micro_batch, sender.name.replica)
        makes = self.here(sender, crossing.produce, f" and makes the {edge.what}")
        uses = self.here(receiver, crossing.consume, f" and needs the {edge.what}")
        missing_send = f"`{edge.send.mnemonic} {number}`"
        missing_recv = f"`{edge.recv.mnemonic} {number}`"
        match crossing.send, crossing.recv:
            case None, None:
                self.add(
                    "RHP404",
                    receiver,
                    crossing.consume,
                    f"{self.text(receiver, crossing.consume)} needs the {edge.what} of "
                    f"{sender.name}, which is neither sent nor received",
                    (makes,),
                    f"add {missing_send} there and {missing_recv} here",
                )
            case None, int(recv):
                self.add(
                    "RHP401",
                    receiver,
                    recv,
                    f"{self.text(receiver, recv)} has no send: {sender.name} lacks {missing_send}",
                    (makes,),
                )
            case int(send), None:
                self.add(
                    "RHP402",
                    sender,
                    send,
                    f"{self.text(sender, send)} has no receive: {receiver.name} lacks "
                    f"{missing_recv}",
                    (uses,),
                )
            case _:
                self._check_chunks(crossing)
        self._check_sender_order(crossing)
        self._check_receiver_order(crossing)

    def _check_sender_order(self, crossing: _Crossing) -> None:
        sender, produce, send = crossing.sender, crossing.produce, crossing.send
        scatter = crossing.scatter
        made = (self.here(sender, produce),)
        if send is not None and send < produce:
            message = f"{self.text(sender, send)} stands before {self.text(sender, produce)}"
            self.add("RHP406", sender, send, message, made)
        elif scatter is not None and (send is None or not produce < scatter < send):
            before = self.text(sender, produce)
            message = f"{self.text(sender, scatter)} must stand between {before} and the send"
            self.add("RHP408", sender, scatter, message, made)

    def _check_receiver_order(self, crossing: _Crossing) -> None:
        receiver, consume, recv = crossing.receiver, crossing.consume, crossing.recv
        gather = crossing.gather
        used = (self.here(receiver, consume),)
        if recv is not None and recv > consume:
            message = f"{self.text(receiver, recv)} stands after {self.text(receiver, consume)}"
            self.add("RHP405", receiver, recv, message, used)
        elif gather is not None and (recv is None or not recv < gather < consume):
            after = self.text(receiver, consume)
            message = f"{self.text(receiver, gather)} must stand between the receive and {after}"
            self.add("RHP408", receiver, gather, message, used)

    def _check_chunks(self, crossing: _Crossing) -> None:
        """RHP409 and RHP410; both the send and the receive exist."""
        edge, sender, receiver = crossing.edge, crossing.sender, crossing.receiver
        send, recv = crossing.send, crossing.recv
        assert send is not None
        assert recv is not None
        cut, joined = crossing.scatter is not None, crossing.gather is not None
        if cut and joined:
            return
        degrees = sender.group.tp, receiver.group.tp
        unequal = degrees[0] != degrees[1]
        code = "RHP410" if unequal else "RHP409"
        number = name_of(crossing.micro_batch, sender.name.replica)
        tp = f"TP {degrees[0]} -> {degrees[1]}"
        if cut != joined or unequal:
            why = f" ({tp})" if unequal else ""
            if not cut:
                what = f"`{edge.scatter.mnemonic} {number}`"
                reason = "the receiver gathers chunks" if joined else "the degrees differ"
                message = f"{self.text(sender, send)} needs {what} before it: {reason}{why}"
                self.add(code, sender, send, message, (self.here(receiver, recv),))
            if not joined:
                what = f"`{edge.gather.mnemonic} {number}`"
                reason = "the sender scatters" if cut else "the degrees differ"
                message = f"{self.text(receiver, recv)} needs {what} after it: {reason}{why}"
                self.add(code, receiver, recv, message, (self.here(sender, send),))

    def _check_tokens(self, edge: Edge, sender: Lane, receiver: Lane) -> None:
        num_chunks = max(sender.group.tp, receiver.group.tp)
        tokens = self.plan.batch.tokens
        if tokens % num_chunks == 0:
            return
        cuts = [index for (op, _), index in sender.first.items() if op is edge.scatter]
        if cuts:
            message = f"{tokens} tokens do not divide into {num_chunks} equal chunks"
            batch = self.parsed.attribute(self.parsed.statement("batch"), "tokens")
            self.add("RHP411", sender, min(cuts), message, (Related("given here", batch),))


def _micro_batches(edge: Edge, sender: Lane, receiver: Lane) -> Iterator[MicroBatch]:
    """Micro-batches that either end computes or transfers, each once, in order of appearance."""
    at_sender = {*edge.produce, edge.scatter, edge.send}
    at_receiver = {edge.recv, edge.gather, *edge.consume}
    seen: dict[MicroBatch, None] = {}
    for lane, ops in ((sender, at_sender), (receiver, at_receiver)):
        seen.update((micro_batch, None) for op, micro_batch in lane.first if op in ops)
    yield from seen
