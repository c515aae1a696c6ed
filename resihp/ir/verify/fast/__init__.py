"""A quick proof that a plan is clean: the same rules as the verifier's, on whole arrays.

`certify` only says whether it has a proof. Where it has none the verifier proper looks what is
wrong, so that a failed proof costs time and nothing else; a proof of a plan that is not clean
would be a fault of the worst kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from resihp.ir.arrays import Arrays, Ints
from resihp.ir.facts import Facts
from resihp.ir.model import Level
from resihp.ir.verify.fast.ends import prove_ends, prove_params
from resihp.ir.verify.fast.grid import Grid, make_grid, prove_work
from resihp.ir.verify.fast.memory import Kept, prove_memory
from resihp.ir.verify.fast.messages import (
    Messages,
    Tensors,
    crossing,
    no_messages,
    prove_channel_order,
    prove_flow,
    prove_handovers,
    tensors_of,
)
from resihp.ir.verify.fast.pairs import first_of_pairs, prove_pairs
from resihp.ir.verify.fast.progress import Meetings, prove_progress
from resihp.ir.verify.fast.stages import held_stages

__all__ = ["certify", "proofs"]


def certify(arrays: Arrays | None, facts: Callable[[], Facts | None]) -> bool:
    """Whether a plan is proved to run as it should under `edge`: to its end, within its memory.

    `facts` gives the sizes that the memory check needs, asked for when all else is proved.
    Covers what instructions say of stages, micro-batches, homes, peers and pairs (RHP104, RHP105,
    RHP109, RHP110) and exactly once, data flow, channel order, progress, memory (if there are
    facts and a memory line) and gradients (RHP3xx to RHP7xx). The rest must be sound: no other
    RHP1xx, and no RHP2xx. True is final; False says nothing about the plan.
    """
    return arrays is not None and all(proved for _, proved in proofs(arrays, facts))


def proofs(arrays: Arrays, facts: Callable[[], Facts | None]) -> Iterator[tuple[str, bool]]:
    """Area by area whether it is proved; ends with the first that is not."""
    grid = make_grid(arrays)
    work = None if grid is None else prove_work(arrays, grid)
    yield "exactly once", work is not None
    if grid is None or work is None:
        return
    held, tensors, pairs = held_stages(arrays), tensors_of(work), first_of_pairs(arrays)
    meetings = prove_ends(arrays, held, grid, work)
    yield "gradients", meetings is not None
    if meetings is None:
        return
    messages = _messages(arrays, grid, tensors)
    flows = messages is not None and prove_handovers(tensors)
    flows = flows and prove_pairs(arrays, work, tensors, pairs)
    yield "data flow", flows and prove_params(arrays, held, grid, work)
    if messages is None:
        return
    ordered = prove_channel_order(messages)
    yield "channel order", ordered is not None
    if ordered is None:
        return
    yield "progress", _prove_progress(arrays, tensors, ordered, meetings, pairs)
    capacity = arrays.plan.memory_bytes
    sizes = None if capacity is None else facts()
    if sizes is not None and capacity is not None:
        kept = Kept(arrays, held, work, tensors, ordered, pairs)
        yield "memory", prove_memory(kept, sizes, capacity)


def _messages(arrays: Arrays, grid: Grid, tensors: tuple[Tensors, Tensors]) -> Messages | None:
    """A schedule has none."""
    if arrays.plan.level is Level.SCHEDULE:
        return no_messages()
    return prove_flow(arrays, grid, tensors)


def _prove_progress(
    arrays: Arrays,
    tensors: tuple[Tensors, Tensors],
    messages: Messages,
    meetings: Meetings,
    pairs: Ints,
) -> bool:
    if arrays.plan.level is Level.PLAN:
        return prove_progress(arrays, messages.send, messages.use, meetings)
    produce, consume = crossing(tensors)
    # What an overlapped pair makes is there when both have ended.
    sent = produce + np.isin(produce, pairs)
    return prove_progress(arrays, sent, consume, meetings)
