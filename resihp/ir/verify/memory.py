"""Peak memory of each device against its capacity, and what is alive at the peak.

One rule per instruction, all in bytes of one member of the group:

    F           takes `activation_bytes` when it starts
    B           takes `weight_input_grad_bytes`, in which is what it computes again; gives
                `released_by_b_bytes` back when it ends
    W           gives the rest of both back when it ends
    BW          is B and W in one
    receive     takes a buffer (whole, or this member's chunks), given back after its use; gather
                replaces the chunks by the whole tensor
    send        takes a buffer (whole, or this member's chunks) until the stream can know that it
                was taken: right before it uses something that the peer sent after using it. Of
                several such things the first one counts that the peer sent, which is a little late
                where the stream uses a later one before
    handover    a tensor that is made and used by the same group is kept in between

Each stage of a group has its own sizes; their states add up. An overlapped pair takes what both
take before it gives anything back. A posted send whose arrival the stream never learns of is held
to the end. This bounds the real peak whatever the speed of the others, since it rests on order
alone, not on time. A schedule names no transfers, so it has no buffers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import BY_TRANSFER, EDGES, Edge, Lane, Task, name_of
from resihp.ir.model import GroupName, Op
from resihp.ir.source import Parsed
from resihp.ir.statements import spell_numbers
from resihp.ir.transfers import Transfer, transfers_of
from resihp.ir.verify.findings import Findings

__all__ = ["Live", "check_memory", "live_spans", "peaks_of", "readable_bytes"]


class Live(NamedTuple):
    """Something that occupies memory while instructions `first .. last` run (both included)."""

    what: str
    number: str
    """The micro-batch, as the stream writes it."""
    num_bytes: int
    first: int
    last: int


def check_memory(
    parsed: Parsed, lanes: Mapping[GroupName, Lane], facts: Facts, findings: Findings
) -> None:
    """RHP601 and RHP602, where the plan has a memory line."""
    capacity = parsed.plan.memory_bytes
    if capacity is None:
        return
    spans = live_spans(lanes, facts)
    for name, lane in lanes.items():
        sizes = facts.stages[name]
        state_bytes = _state_bytes(sizes)
        if state_bytes > capacity:
            span = parsed.groups[parsed.plan.groups.index(lane.group)]
            message = (
                f"the state of {name} takes {readable_bytes(state_bytes)} on "
                f"{_on(lane)}; the device has {readable_bytes(capacity)}"
            )
            findings.add("RHP602", span, message, replica=name.replica)
            continue
        _check_lane(parsed, lane, sizes, spans[name], findings)


def _check_lane(
    parsed: Parsed, lane: Lane, sizes: Sequence[StageFacts], spans: list[Live], findings: Findings
) -> None:
    capacity = parsed.plan.memory_bytes
    totals = _totals(spans, lane, sizes)
    peak = max(totals, default=0)
    if capacity is None or peak <= capacity:
        return
    at = totals.index(peak)
    findings.add(
        "RHP601",
        parsed.streams[lane.stream].span(at),
        f"{lane.name} needs {readable_bytes(peak)} on {_on(lane)} at {lane.text(at)}; the device "
        f"has {readable_bytes(capacity)}",
        hint=f"alive here: {_alive(spans, at, _state_bytes(sizes))}",
        replica=lane.name.replica,
    )


def peaks_of(lanes: Mapping[GroupName, Lane], facts: Facts) -> dict[GroupName, int]:
    """The most that one member of each lane needs at any instruction."""
    return {
        name: max(
            _totals(spans, lanes[name], facts.stages[name]),
            default=_state_bytes(facts.stages[name]),
        )
        for name, spans in live_spans(lanes, facts).items()
    }


def _state_bytes(sizes: Sequence[StageFacts]) -> int:
    return sum(stage.state_bytes for stage in sizes)


def _totals(spans: Iterable[Live], lane: Lane, sizes: Sequence[StageFacts]) -> list[int]:
    """Bytes in use at each instruction."""
    change = [0] * (len(lane.body) + 1)
    for live in spans:
        change[live.first] += live.num_bytes
        change[live.last + 1] -= live.num_bytes
    return [_state_bytes(sizes) + live for live in accumulate(change[:-1])]


def _on(lane: Lane) -> str:
    ranks = spell_numbers(lane.group.ranks)
    return f"rank {ranks}" if lane.group.tp == 1 else f"each of ranks {ranks}"


def _alive(spans: list[Live], at: int, state_bytes: int) -> str:
    parts = [f"state {readable_bytes(state_bytes)}"]
    by_kind: dict[str, list[Live]] = {}
    for live in spans:
        if live.first <= at <= live.last:
            by_kind.setdefault(live.what, []).append(live)
    for what, alive in by_kind.items():
        total = sum(live.num_bytes for live in alive)
        numbers = ", ".join(dict.fromkeys(live.number for live in alive))
        parts.append(f"{what} of {numbers} {readable_bytes(total)}")
    return "; ".join(parts)


def live_spans(lanes: Mapping[GroupName, Lane], facts: Facts) -> dict[GroupName, list[Live]]:
    """Everything beyond the state that each lane keeps alive, with its life."""
    sent: _Sent = defaultdict(list)
    for transfer in transfers_of(lanes):
        sent[transfer.sender, transfer.receiver].append(transfer)
    return {
        name: list(_spans_of(lanes, lane, facts.stages[name], sent)) for name, lane in lanes.items()
    }


_Sent = dict[tuple[GroupName, GroupName], list[Transfer]]
"""What goes from one lane to another, in the order of its sends."""


def _spans_of(
    lanes: Mapping[GroupName, Lane],
    lane: Lane,
    sizes: Sequence[StageFacts],
    sent: _Sent,
) -> Iterable[Live]:
    of_stage = dict(zip(lane.stages, sizes, strict=True))
    parts = (
        _activations(lane, of_stage),
        _handovers(lane, of_stage),
        _receive_buffers(lanes, lane, of_stage),
        _send_buffers(lanes, lane, of_stage, sent),
    )
    spans = chain.from_iterable(parts)
    if not lane.pairs:
        return spans
    return (
        live._replace(first=lane.head_of(live.first), last=lane.last_of(live.last))
        for live in spans
    )


def _name(lane: Lane, task: Task) -> str:
    stage = f"[{task.stage}] " if len(lane.stages) > 1 else ""
    return f"{stage}{name_of(task, lane.name.replica)}"


def _activations(lane: Lane, of_stage: Mapping[int, StageFacts]) -> Iterator[Live]:
    end = len(lane.body) - 1
    for (op, task), first in lane.first.items():
        if op is not Op.F:
            continue
        number, sizes = _name(lane, task), of_stage[task.stage]
        kept = sizes.activation_bytes - sizes.released_by_b_bytes
        fused = lane.first.get((Op.BW, task))
        b = lane.first.get((Op.B, task), end) if fused is None else fused
        w = lane.first.get((Op.W, task), end) if fused is None else fused
        yield Live("activations", number, sizes.released_by_b_bytes, first, max(b, first))
        yield Live("activations", number, kept, first, max(w, first))
        yield Live("output gradients", number, sizes.weight_input_grad_bytes, b, max(w, b))


def _handovers(lane: Lane, of_stage: Mapping[int, StageFacts]) -> Iterator[Live]:
    if len(lane.stages) == 1:
        return
    for edge in EDGES:
        for (op, task), made in lane.first.items():
            if op in edge.produce:
                used = lane.find(edge.consume, task.at(task.stage + edge.stage_step))
                if used is not None and used > made:
                    num_bytes = of_stage[task.stage].boundary_bytes
                    yield Live(f"{edge.what}s in place", _name(lane, task), num_bytes, made, used)


def _chunk_bytes(boundary_bytes: int, mine: Lane, other: Lane) -> int:
    """The most that one member of `mine` sends or receives of a scattered tensor."""
    num_chunks = max(mine.group.tp, other.group.tp)
    return boundary_bytes * (num_chunks // mine.group.tp) // num_chunks


def _transfers(
    lanes: Mapping[GroupName, Lane], lane: Lane, *, sends: bool
) -> Iterator[tuple[Edge, Task, int, Lane]]:
    """The sends, or the receives, of a lane that name another one, which is the last item."""
    for (op, task), index in lane.first.items():
        edge = BY_TRANSFER.get(op)
        if edge is not None and op is (edge.send if sends else edge.recv):
            far_end = lane.far_end(index)
            other = None if far_end is None else lanes.get(far_end[0])
            if other is not None and other is not lane:
                yield edge, task, index, other


def _receive_buffers(
    lanes: Mapping[GroupName, Lane], lane: Lane, of_stage: Mapping[int, StageFacts]
) -> Iterator[Live]:
    for edge, task, recv, sender in _transfers(lanes, lane, sends=False):
        number, whole = _name(lane, task), of_stage[task.stage].boundary_bytes
        use = lane.find(edge.consume, task)
        last = len(lane.body) - 1 if use is None or use < recv else use
        gather = lane.first.get((edge.gather, task))
        if gather is None or not recv < gather < last:
            yield Live("receive buffers", number, whole, recv, last)
        else:
            yield Live("receive buffers", number, _chunk_bytes(whole, lane, sender), recv, gather)
            yield Live("receive buffers", number, whole, gather, last)


def _send_buffers(
    lanes: Mapping[GroupName, Lane],
    lane: Lane,
    of_stage: Mapping[int, StageFacts],
    sent: _Sent,
) -> Iterator[Live]:
    uses: dict[GroupName, dict[int, int | None]] = {}
    answers: dict[GroupName, _Answers] = {}
    for edge, task, send, receiver in _transfers(lanes, lane, sends=True):
        num_bytes = of_stage[task.stage].boundary_bytes
        if (edge.scatter, task) in lane.first:
            num_bytes = _chunk_bytes(num_bytes, lane, receiver)
        name = receiver.name
        if name not in answers:
            uses[name] = {transfer.send: transfer.use for transfer in sent[lane.name, name]}
            answers[name] = _answers(lane, sent[name, lane.name])
        last, taken = len(lane.body) - 1, uses[name].get(send)
        if taken is not None:
            use = _first_answer(answers[name], taken)
            last = last if use is None else max(use - 1, send)
        yield Live("posted sends", _name(lane, task), num_bytes, send, last)


class _Answers(NamedTuple):
    """What a peer sends back, in the order of its sends."""

    sends: list[int]
    earliest_use: list[int]
    """Of this one and of all that are sent later."""


def _answers(lane: Lane, sent: Sequence[Transfer]) -> _Answers:
    """Each with its use: its receive is only posted where it stands, and may bring it later."""
    answers = [
        (transfer.send, lane.head_of(transfer.use)) for transfer in sent if transfer.use is not None
    ]
    earliest = list(accumulate((use for _, use in reversed(answers)), min))
    return _Answers([send for send, _ in answers], earliest[::-1])


def _first_answer(answers: _Answers, taken: int) -> int | None:
    """The first use of what the peer sent after its instruction `taken`.

    Where nothing gets stuck it comes after the send that is answered.
    """
    first = bisect_right(answers.sends, taken)
    return answers.earliest_use[first] if first < len(answers.sends) else None


def readable_bytes(num_bytes: int) -> str:
    """`1.5 GiB` for a message."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
