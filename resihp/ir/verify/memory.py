"""Peak memory of each device against its capacity, and what is alive at the peak.

One rule per instruction, all in bytes of one member of the group:

    F           takes `activation_bytes` when it starts
    B           takes `weight_input_grad_bytes`, gives `released_by_b_bytes` back when it ends
    W           gives the rest of both back when it ends
    BW          is B and W in one
    receive     takes a buffer (whole, or this member's chunks), given back after its use; gather
                replaces the chunks by the whole tensor
    send        takes a buffer (whole, or this member's chunks) until the stream can know that it
                was taken: right before it uses something that the peer sent after using it

A posted send whose arrival the stream never learns of is held to the end. This bounds the real
peak whatever the speed of the others, since it rests on order alone, not on time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from resihp.ir.expand import chunk_routes
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import EDGES, Edge, Lane, name_of
from resihp.ir.model import GroupName, Op
from resihp.ir.source import Parsed
from resihp.ir.statements import spell_numbers
from resihp.ir.verify.findings import Findings

__all__ = ["Live", "check_memory", "live_spans", "peak_bytes", "readable_bytes"]


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
    for name, lane in lanes.items():
        sizes = facts.stages[name]
        if sizes.state_bytes > capacity:
            span = parsed.groups[parsed.plan.groups.index(lane.group)]
            message = (
                f"the state of {name} takes {readable_bytes(sizes.state_bytes)} on "
                f"{_on(lane)}; the device has {readable_bytes(capacity)}"
            )
            findings.add("RHP602", span, message, replica=name.replica)
            continue
        _check_lane(parsed, lanes, lane, sizes, capacity, findings)


def _check_lane(
    parsed: Parsed,
    lanes: Mapping[GroupName, Lane],
    lane: Lane,
    sizes: StageFacts,
    capacity: int,
    findings: Findings,
) -> None:
    spans = list(live_spans(lanes, lane, sizes))
    totals = _totals(spans, lane, sizes)
    peak = max(totals, default=0)
    if peak <= capacity:
        return
    at = totals.index(peak)
    text = _mnemonic(lane, at)
    findings.add(
        "RHP601",
        parsed.streams[lane.stream].span(at),
        f"{lane.name} needs {readable_bytes(peak)} on {_on(lane)} at `{text}`; the device has "
        f"{readable_bytes(capacity)}",
        hint=f"alive here: {_alive(spans, at, sizes.state_bytes)}",
        replica=lane.name.replica,
    )


def peak_bytes(lanes: Mapping[GroupName, Lane], lane: Lane, sizes: StageFacts) -> int:
    """The most that one member of `lane` needs at any instruction."""
    return max(_totals(live_spans(lanes, lane, sizes), lane, sizes), default=sizes.state_bytes)


def _totals(spans: Iterable[Live], lane: Lane, sizes: StageFacts) -> list[int]:
    """Bytes in use at each instruction."""
    change = [0] * (len(lane.body) + 1)
    for live in spans:
        change[live.first] += live.num_bytes
        change[live.last + 1] -= live.num_bytes
    return [sizes.state_bytes + live for live in accumulate(change[:-1])]


def _on(lane: Lane) -> str:
    ranks = spell_numbers(lane.group.ranks)
    return f"rank {ranks}" if lane.group.tp == 1 else f"each of ranks {ranks}"


def _mnemonic(lane: Lane, index: int) -> str:
    micro_batch = lane.micro_batches[index]
    mnemonic = lane.body[index].op.mnemonic
    if micro_batch is None:
        return mnemonic
    return f"{mnemonic} {name_of(micro_batch, lane.name.replica)}"


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


def live_spans(lanes: Mapping[GroupName, Lane], lane: Lane, sizes: StageFacts) -> Iterator[Live]:
    """Everything beyond the state that `lane` keeps alive, with its life."""
    yield from _activations(lane, sizes)
    for edge in EDGES:
        upstream = GroupName(lane.name.replica, lane.name.pp - edge.stage_step)
        if upstream in lanes:
            yield from _receive_buffers(lane, lanes[upstream], edge, sizes)
        downstream = GroupName(lane.name.replica, lane.name.pp + edge.stage_step)
        if downstream in lanes:
            yield from _send_buffers(lane, lanes[downstream], edge, sizes)


def _activations(lane: Lane, sizes: StageFacts) -> Iterator[Live]:
    kept = sizes.activation_bytes - sizes.released_by_b_bytes
    end = len(lane.body) - 1
    for (op, micro_batch), first in lane.first.items():
        if op is not Op.F:
            continue
        number = name_of(micro_batch, lane.name.replica)
        fused = lane.first.get((Op.BW, micro_batch))
        b = lane.first.get((Op.B, micro_batch), end) if fused is None else fused
        w = lane.first.get((Op.W, micro_batch), end) if fused is None else fused
        yield Live("activations", number, sizes.released_by_b_bytes, first, max(b, first))
        yield Live("activations", number, kept, first, max(w, first))
        yield Live("output gradients", number, sizes.weight_input_grad_bytes, b, max(w, b))


def _chunk_bytes(boundary_bytes: int, mine: Lane, sender: Lane, receiver: Lane) -> int:
    """The most that one member of `mine` sends or receives of a scattered tensor."""
    routes = chunk_routes(sender.group.tp, receiver.group.tp)
    return boundary_bytes * (len(routes) // mine.group.tp) // len(routes)


def _receive_buffers(lane: Lane, upstream: Lane, edge: Edge, sizes: StageFacts) -> Iterator[Live]:
    whole = sizes.boundary_bytes
    chunks = _chunk_bytes(whole, lane, upstream, lane)
    for (op, micro_batch), recv in lane.first.items():
        if op is not edge.recv:
            continue
        number = name_of(micro_batch, lane.name.replica)
        use = lane.find(edge.consume, micro_batch)
        last = len(lane.body) - 1 if use is None or use < recv else use
        gather = lane.first.get((edge.gather, micro_batch))
        if gather is None or not recv < gather < last:
            yield Live("receive buffers", number, whole, recv, last)
        else:
            yield Live("receive buffers", number, chunks, recv, gather)
            yield Live("receive buffers", number, whole, gather, last)


def _send_buffers(lane: Lane, downstream: Lane, edge: Edge, sizes: StageFacts) -> Iterator[Live]:
    whole = sizes.boundary_bytes
    chunks = _chunk_bytes(whole, lane, lane, downstream)
    answers = _answers(lane, downstream)
    for (op, micro_batch), send in lane.first.items():
        if op is not edge.send:
            continue
        taken = downstream.use_of(edge, micro_batch)
        last = len(lane.body) - 1
        if taken is not None:
            last = _first_answer(answers, taken, send, last)
        cut = (edge.scatter, micro_batch) in lane.first
        number = name_of(micro_batch, lane.name.replica)
        yield Live("posted sends", number, chunks if cut else whole, send, last)


def _answers(lane: Lane, peer: Lane) -> list[tuple[int, int]]:
    """(send in `peer`, its use in `lane`) of all that `peer` sends here, in send order.

    A receive is only posted where it stands; what it brings is here for sure where it is used.
    """
    step = lane.name.pp - peer.name.pp
    back = next(edge for edge in EDGES if edge.stage_step == step)
    return sorted(
        (index, use)
        for (op, micro_batch), index in peer.first.items()
        if op is back.send and (use := lane.use_of(back, micro_batch)) is not None
    )


def _first_answer(answers: list[tuple[int, int]], taken: int, send: int, end: int) -> int:
    """Right before the first use after `send` of what the peer sent after index `taken`."""
    start = bisect_right(answers, (taken, end + 1))
    return next((use - 1 for _, use in answers[start:] if use > send), end)


def readable_bytes(num_bytes: int) -> str:
    """`1.5 GiB` for a message."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
