"""Progress under `edge`: every stream reaches its end.

Only two kinds of instructions wait: those that use a message, for its send, and `reduce_grads`,
for all streams of its stage. A stream between two of these needs nobody, so it is enough to move
along the waiting instructions. One of them may go on once the sender has come past as many
waiting instructions as stand before the send. Wide plans are moved in rounds, all lanes at once;
narrow and deep ones lane by lane. An overlapped pair waits for the inputs of both instructions;
so does the second after the first, since nothing is sent in between.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from resihp.ir.arrays import Arrays, Ints, Lanes

__all__ = ["Meetings", "Nodes", "Walk", "nodes_of", "prove_progress", "walk"]

_NODES_PER_ROUND = 24
"""So many waiting instructions, one by one, take as long as a round of all lanes."""
_SLACK = 1.5
"""Rounds for each waiting instruction of the longest lane, as a guess."""
_NEVER = 1 << 40


class Meetings(NamedTuple):
    """All `reduce_grads`, one entry each."""

    at: Ints
    """Index of the instruction."""
    lane: Ints
    stage: Ints


class Nodes(NamedTuple):
    """Waiting instructions, lane after lane; each lane ends with one that waits for ever."""

    first: Ints
    """First node of each lane, and at the end the number of all."""
    awaited: Ints
    """Lane that each node waits for; numbers after the lanes are stages that reduce."""
    until: Ints
    """Node that the awaited lane must have come to."""
    user: Ints
    """Node of each instruction that uses a message."""
    meeting: Ints
    """Node of each `reduce_grads`."""

    @property
    def num(self) -> int:
        """Number of nodes."""
        return len(self.until)


class Walk(NamedTuple):
    """An order in which all nodes can be passed; `Nodes.num + s` says that stage s has met."""

    rounds: list[Ints]
    """Nodes, or stages, that do not wait for each other; one such set after the other."""
    rest: list[int]
    """What comes after the rounds, one by one."""


def prove_progress(arrays: Arrays, sent: Ints, use: Ints, meetings: Meetings) -> bool:
    """Whether no stream waits for ever.

    `sent` are indices of instructions after which a tensor is on its way, `use` those of the
    instructions that wait for it.
    """
    return _ends(arrays.lanes, nodes_of(arrays, sent, use, meetings), meetings, None)


def walk(lanes: Lanes, nodes: Nodes, meetings: Meetings) -> Walk | None:
    """How every stream comes to its end; None if one waits for ever."""
    order = Walk([], [])
    return order if _ends(lanes, nodes, meetings, order) else None


def _ends(lanes: Lanes, nodes: Nodes, meetings: Meetings, order: Walk | None) -> bool:
    """Whether every lane ends; `order` is filled with how."""
    num_stages = int(meetings.stage.max(initial=-1)) + 1
    # The node that each lane waits at, then a 1 for each stage that has met.
    at = np.concatenate((nodes.first[:-1], np.zeros(num_stages, np.intp)))
    if not _in_rounds(nodes, meetings, at, order):
        _one_by_one(nodes, np.bincount(meetings.stage).tolist(), at, order)
    return np.array_equal(at[: lanes.num], nodes.first[1:] - 1)


def nodes_of(arrays: Arrays, sent: Ints, use: Ints, meetings: Meetings) -> Nodes:
    """The waiting instructions; arguments as for `prove_progress`."""
    lanes, lane = arrays.lanes, arrays.lane
    upto = np.zeros(lanes.num_instrs + 1, np.intp)
    upto[use + 1] = 1
    upto[meetings.at + 1] = 1
    # How many wait before each instruction; each lane before it has another node at its end.
    np.cumsum(upto, out=upto)
    first = upto[lanes.start] + np.arange(lanes.num + 1)
    awaited = np.zeros(int(first[-1]), np.intp)
    until = np.full(len(awaited), _NEVER)
    sender = lane[sent]
    user, meeting = upto[use] + lane[use], upto[meetings.at] + meetings.lane
    until[user] = upto[sent + 1] + sender
    awaited[user] = sender
    awaited[meeting] = lanes.num + meetings.stage
    until[meeting] = 1
    return Nodes(first, awaited, until, user, meeting)


def _in_rounds(nodes: Nodes, meetings: Meetings, at: Ints, order: Walk | None) -> bool:
    """Move every lane that can by a node, again and again; False where that is the slower way."""
    num_lanes = len(nodes.first) - 1
    lanes = at[:num_lanes]
    budget = len(nodes.until) / _NODES_PER_ROUND
    if _SLACK * int(np.diff(nodes.first).max()) > budget:
        return False
    while budget > 0:
        goes_on = at[nodes.awaited[lanes]] >= nodes.until[lanes]
        budget -= 1
        if goes_on.any():
            if order is not None:
                order.rounds.append(lanes[goes_on])
            lanes += goes_on
            continue
        budget -= len(meetings.at) / _NODES_PER_ROUND
        opened = _meet(nodes, meetings, at)
        if not len(opened):
            return True
        if order is not None:
            order.rounds.append(nodes.num + opened)
    return False


def _meet(nodes: Nodes, meetings: Meetings, at: Ints) -> Ints:
    """Let stages go on whose lanes have all come to their `reduce_grads`; which these are."""
    num_lanes = len(nodes.first) - 1
    late = at[meetings.lane] < nodes.meeting
    missing = np.bincount(meetings.stage, late, len(at) - num_lanes)
    opened = np.flatnonzero((missing == 0) & (at[num_lanes:] == 0))
    at[num_lanes + opened] = 1
    return opened


def _one_by_one(nodes: Nodes, num_members: list[int], at: Ints, order: Walk | None) -> None:
    """Move each lane as far as it goes, and then those that waited for it."""
    awaited: list[int] = nodes.awaited.tolist()
    until: list[int] = nodes.until.tolist()
    here: list[int] = at.tolist()
    num_lanes = len(nodes.first) - 1
    waiting: list[list[tuple[int, int]]] = [[] for _ in here]
    """For each lane or stage a heap of those that wait for it: (until where, lane)."""
    ready = list(range(num_lanes))
    while ready:
        lane = ready.pop()
        node = here[lane]
        while here[awaited[node]] >= until[node]:
            node += 1
        if order is not None:
            order.rest.extend(range(here[lane], node))
        here[lane] = node
        for_me = waiting[lane]
        while for_me and for_me[0][0] <= node:
            ready.append(heappop(for_me)[1])
        there = awaited[node]
        heappush(waiting[there], (until[node], lane))
        if there >= num_lanes and len(waiting[there]) == num_members[there - num_lanes]:
            here[there] = 1
            ready += (member for _, member in waiting[there])
            if order is not None:
                order.rest.append(nodes.num + there - num_lanes)
    at[:] = here
