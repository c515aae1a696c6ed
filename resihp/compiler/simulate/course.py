"""What of a plan decides when things happen, without any price: who waits for whom, in what order.

A stream runs from one waiting instruction (node) to the next without needing anybody, so the time
of everything follows from the nodes: a node is passed once the stream has come to it and the
tensor that it uses has arrived, or all holders of its stage have come to `reduce_grads`. The
proof of progress passes all nodes in rounds; the course keeps that order, so that times for any
prices are a few array operations per round.

A plan is played under `edge`, whatever transport it names: what the others accept, `edge` accepts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resihp.errors import UserError
from resihp.ir.arrays import Arrays, Bits, Ints
from resihp.ir.model import Level
from resihp.ir.verify.fast.ends import prove_ends
from resihp.ir.verify.fast.grid import Work, make_grid, prove_work
from resihp.ir.verify.fast.messages import (
    Messages,
    Tensors,
    crossing,
    no_messages,
    prove_flow,
    tensors_of,
)
from resihp.ir.verify.fast.pairs import first_of_pairs
from resihp.ir.verify.fast.progress import Meetings, Nodes, Walk, nodes_of, walk
from resihp.ir.verify.fast.stages import Held, held_stages

__all__ = ["Course", "Crossings", "course_of"]


class Crossings(NamedTuple):
    """Every tensor that goes from group to group, one entry each."""

    sent: Ints
    """Instruction that sends it, in a schedule the one that makes it."""
    use: Ints
    """Instruction that waits for it."""
    sender: Ints
    """Lanes."""
    receiver: Ints
    is_cut: Bits


class Course(NamedTuple):
    """A plan ready to be played at any prices. Indices are those of `resihp.ir.arrays`.

    Entries of `position` and `source` are the begins of the lanes and the nodes: entry n + 1 is
    node n, and the entry before the first node of a lane is its begin. Entries after these are
    the stages that meet.
    """

    arrays: Arrays
    held: Held
    work: Work
    tensors: tuple[Tensors, Tensors]
    messages: Messages
    """Empty for a schedule."""
    crossings: Crossings
    meetings: Meetings
    pairs: Ints
    """First instructions of overlapped pairs."""
    nodes: Nodes
    walk: Walk
    position: Ints
    """Instruction whose start each entry decides."""
    source: Ints
    """Entry that each node waits for; 0 for the begin of a lane."""

    @property
    def num_entries(self) -> int:
        """Begins of lanes and nodes."""
        return self.nodes.num + 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.arrays.placement.num_stages


def course_of(arrays: Arrays | None) -> Course:
    """The course of a verified plan or schedule.

    Raises UserError for one that the verifier has findings about.
    """
    grid = None if arrays is None else make_grid(arrays)
    if arrays is None or grid is None:
        raise _unsound("some of its work is missing, or there twice")
    work = prove_work(arrays, grid)
    if work is None:
        raise _unsound("some of its work is missing, or in the wrong place")
    held, tensors, pairs = held_stages(arrays), tensors_of(work), first_of_pairs(arrays)
    meetings = prove_ends(arrays, held, grid, work)
    if meetings is None:
        raise _unsound("gradients are not reduced, or too early")
    is_plan = arrays.plan.level is Level.PLAN
    messages = prove_flow(arrays, grid, tensors) if is_plan else no_messages()
    if messages is None:
        raise _unsound("a tensor does not reach its use")
    crossings = _of_plan(messages) if is_plan else _of_schedule(tensors)
    # What an overlapped pair of a schedule makes is there when both have ended.
    sent = crossings.sent if is_plan else crossings.sent + np.isin(crossings.sent, pairs)
    crossings = crossings._replace(sent=sent)
    nodes = nodes_of(arrays, crossings.sent, crossings.use, meetings)
    order = walk(arrays.lanes, nodes, meetings)
    if order is None:
        raise _unsound("streams wait for each other for ever")
    position, source = _entries(arrays, crossings, meetings, pairs, nodes)
    return Course(
        arrays,
        held,
        work,
        tensors,
        messages,
        crossings,
        meetings,
        pairs,
        nodes,
        order,
        position,
        source,
    )


def _unsound(what: str) -> UserError:
    return UserError(f"the plan cannot be played: {what}; `resihp verify` tells more")


def _of_plan(messages: Messages) -> Crossings:
    return Crossings(
        messages.send, messages.use, messages.sender, messages.receiver, messages.is_cut
    )


def _of_schedule(tensors: tuple[Tensors, Tensors]) -> Crossings:
    produce, consume = crossing(tensors)
    sender = np.concatenate([kind.sender[kind.leaves] for kind in tensors])
    receiver = np.concatenate([kind.receiver[kind.leaves] for kind in tensors])
    return Crossings(produce, consume, sender, receiver, np.zeros(len(produce), np.bool_))


def _entries(
    arrays: Arrays, crossings: Crossings, meetings: Meetings, pairs: Ints, nodes: Nodes
) -> tuple[Ints, Ints]:
    """Position and source of every entry."""
    position = np.zeros(nodes.num + 1, np.intp)
    source = np.zeros(nodes.num + 1, np.intp)
    position[nodes.first] = arrays.lanes.start
    # An overlapped pair starts once the inputs of both are there.
    use = crossings.use - np.isin(crossings.use - 1, pairs) if len(pairs) else crossings.use
    position[nodes.user + 1] = use
    # The last node before the send: what the awaited lane must have passed.
    source[nodes.user + 1] = nodes.until[nodes.user]
    position[nodes.meeting + 1] = meetings.at
    source[nodes.meeting + 1] = nodes.num + 1 + meetings.stage
    return position, source
