"""Peak memory within the capacity, by the rules of `resihp.ir.verify.memory`.

Everything that is kept is taken when one instruction starts and given back when another ends, so
the bytes in use are a running sum over the lanes, one after the other.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from resihp.ir.arrays import Arrays, Ints, Lanes
from resihp.ir.facts import Facts
from resihp.ir.model import GroupName
from resihp.ir.verify.fast.grid import Work
from resihp.ir.verify.fast.messages import Messages, Tensors
from resihp.ir.verify.fast.stages import Held

__all__ = ["Kept", "Usage", "prove_memory", "usage_of"]

_LARGEST_SUM = 1 << 62


class _Sizes(NamedTuple):
    """Bytes; all but `state` with one entry for each (lane, stage)."""

    state: Ints
    """One entry per lane."""
    activation: Ints
    released: Ints
    grad: Ints
    boundary: Ints


class _Account:
    """What each instruction takes when it starts and gives back when it ends."""

    def __init__(self, num_instrs: int) -> None:
        self.taken = np.zeros(num_instrs, np.intp)
        self.given = np.zeros(num_instrs, np.intp)

    def keep(self, num_bytes: Ints, first: Ints, last: Ints) -> None:
        """Keep bytes while `first .. last` run. No index may be twice in one of the two."""
        self.taken[first] += num_bytes
        self.given[last] += num_bytes

    def overlap(self, first_of_pairs: Ints) -> None:
        """A pair takes everything when it starts and gives everything when it ends."""
        self.taken[first_of_pairs] += self.taken[first_of_pairs + 1]
        self.taken[first_of_pairs + 1] = 0
        self.given[first_of_pairs + 1] += self.given[first_of_pairs]
        self.given[first_of_pairs] = 0

    def in_use(self) -> Ints:
        """What is in use at each instruction; each lane ends with as much as it begins with."""
        in_use = np.cumsum(self.taken)
        in_use[1:] -= np.cumsum(self.given)[:-1]
        return in_use


class Usage(NamedTuple):
    """Bytes on one member of each group, by the rules of `resihp.ir.verify.memory`."""

    state: Ints
    """Always in use, one entry per lane."""
    during: Ints
    """In use beside the state while each instruction runs."""
    given: Ints
    """Given back when it ends."""

    def peaks(self, lanes: Lanes) -> Ints:
        """The most that is in use at any instruction, for each lane that has one."""
        has_instrs = np.diff(lanes.start) > 0
        peaks = np.maximum.reduceat(self.during, lanes.start[:-1][has_instrs])
        return peaks + self.state[has_instrs]


class Kept(NamedTuple):
    """What of a plan takes memory."""

    arrays: Arrays
    held: Held
    work: Work
    tensors: tuple[Tensors, Tensors]
    messages: Messages
    """Sorted by receiver, then by send."""
    pairs: Ints
    """First instructions of overlapped pairs."""


def prove_memory(kept: Kept, facts: Facts, capacity: int) -> bool:
    """Whether no lane ever needs more than `capacity` bytes."""
    usage = usage_of(kept, facts)
    if usage is None or (usage.state > capacity).any():
        return False
    return bool((usage.peaks(kept.arrays.lanes) <= capacity).all())


def usage_of(kept: Kept, facts: Facts) -> Usage | None:
    """What is in use at every instruction; None for sizes whose sums an integer cannot hold."""
    lanes, held, work = kept.arrays.lanes, kept.held, kept.work
    sizes = _sizes(lanes, facts)
    if sizes is None:
        return None
    account = _Account(lanes.num_instrs)
    entry = held.entry(work.lane, np.arange(len(held.number))[:, None])
    released, grad = sizes.released[entry], sizes.grad[entry]
    account.keep(released, work.forward, work.backward)
    account.keep(sizes.activation[entry] - released, work.forward, work.weights)
    account.keep(grad, work.backward, work.weights)
    for kind in kept.tensors:
        stays = kind.stays
        num_bytes = sizes.boundary[held.entry(kind.sender[stays], kind.made_by[stays])]
        account.keep(num_bytes, kind.produce[stays], kind.consume[stays])
    if len(kept.messages.send):
        _keep_buffers(account, kept, sizes)
    account.overlap(kept.pairs)
    return Usage(sizes.state, account.in_use(), account.given)


def _sizes(lanes: Lanes, facts: Facts) -> _Sizes | None:
    """The sizes; None where their sums might not fit into an integer of the machine."""
    of_lane = [
        facts.stages[GroupName(replica, pp)]
        for replica, pp in zip(lanes.replica.tolist(), lanes.pp.tolist(), strict=True)
    ]
    state = [sum(stage.state_bytes for stage in stages) for stages in of_lane]
    fields = attrgetter(
        "activation_bytes", "released_by_b_bytes", "weight_input_grad_bytes", "boundary_bytes"
    )
    columns = list(zip(*map(fields, chain.from_iterable(of_lane)), strict=True))
    largest = max(map(abs, chain(state, *columns)), default=0)
    if largest * (4 * lanes.num_instrs + 1) * int(lanes.tp.max()) > _LARGEST_SUM:
        return None
    return _Sizes(np.array(state), *map(np.array, columns))


def _keep_buffers(account: _Account, kept: Kept, sizes: _Sizes) -> None:
    lanes, held, messages = kept.arrays.lanes, kept.held, kept.messages
    sender, receiver = messages.sender, messages.receiver
    is_cut = messages.is_cut
    cut = np.flatnonzero(is_cut)
    num_chunks = np.maximum(lanes.tp[sender[cut]], lanes.tp[receiver[cut]])

    def part(whole: Ints, lane: Ints) -> Ints:
        """What one member of `lane` sends or receives of the tensors that are cut."""
        return whole[cut] * (num_chunks // lanes.tp[lane[cut]]) // num_chunks

    whole = sizes.boundary[held.entry(receiver, messages.used_by)]
    account.keep(part(whole, receiver), messages.recv[cut], messages.use[cut])
    account.keep(whole, np.where(is_cut, messages.use, messages.recv), messages.consume)
    sent = sizes.boundary[held.entry(sender, messages.made_by)]
    sent[cut] = part(sent, sender)
    account.taken[messages.send] += sent
    np.add.at(account.given, _last_held(lanes, messages, kept.pairs), sent)


def _last_held(lanes: Lanes, messages: Messages, pairs: Ints) -> Ints:
    """The last instruction at which each message is still held by its sender.

    That is the one before the first use of what the receiver sent back after using the message.
    Where nothing gets stuck, that use comes after the send.
    """
    # An overlapped pair uses what it uses when it starts.
    use = messages.use - np.isin(messages.use - 1, pairs) if len(pairs) else messages.use
    last = lanes.start[messages.sender + 1] - 1
    key = (messages.receiver << 32) | messages.send
    answer = np.searchsorted(key, (messages.sender << 32) | messages.use, "right")
    of_channel = (messages.receiver << 32) | messages.sender
    # Uses of later channels are larger, so that the minimum from the end on is that of a channel.
    channel = np.cumsum(np.diff(of_channel, prepend=of_channel[:1]) != 0)
    earliest = np.minimum.accumulate((use + channel * lanes.num_instrs)[::-1])[::-1]
    waiting = np.flatnonzero(answer < len(last))
    answer = answer[waiting]
    answers = of_channel[answer] == (messages.sender[waiting] << 32) | messages.receiver[waiting]
    waiting, answer = waiting[answers], answer[answers]
    last[waiting] = earliest[answer] - channel[answer] * lanes.num_instrs - 1
    return last
