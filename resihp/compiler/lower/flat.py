"""The streams of a plan as one array of numbers, one for each instruction.

A number holds all fields of an instruction, so that adding instructions to hundreds of thousands
is arithmetic on arrays. Groups that run one stream under the same name are in it once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.ir.arrays import distinct
from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.placement import Placement, placement_of

__all__ = ["Bits", "Codes", "Flat", "Ints", "Layout", "bodies_of", "flat_of", "inserted"]

Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]


class Codes(NamedTuple):
    """How an instruction becomes a number: its fields with None as 0, the operation first."""

    stages: int
    microbatches: int
    replicas: int

    def encode(self, instr: Instr) -> int:
        """The number of one instruction."""
        fields = (instr.stage, instr.microbatch, instr.home, instr.peer)
        code = 2 * instr.op + instr.paired
        for size, value in zip(self._sizes, fields, strict=True):
            code = code * size + (0 if value is None else value + 1)
        return code

    def decode(self, code: int) -> Instr:
        """The instruction of a number."""
        fields: list[int | None] = []
        for size in reversed(self._sizes):
            code, value = divmod(code, size)
            fields.append(value - 1 if value else None)
        peer, home, microbatch, stage = fields
        return Instr(Op(code >> 1), microbatch, home, stage, peer, bool(code & 1))

    @property
    def op_unit(self) -> int:
        """One operation more."""
        return 2 * self.pair_unit

    @property
    def pair_unit(self) -> int:
        """What `paired` adds."""
        return (self.stages + 1) * (self.microbatches + 1) * (self.replicas + 1) ** 2

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        replicas = self.replicas + 1
        return self.stages + 1, self.microbatches + 1, replicas, replicas


class Layout(NamedTuple):
    """What does not change while instructions are added."""

    plan: Plan
    placement: Placement
    codes: Codes
    names: Sequence[GroupName]
    """Of each lane, replica by replica."""


class Flat(NamedTuple):
    """All lanes, one after the other."""

    layout: Layout
    start: Ints
    """Index of the first instruction of each lane, and at the end the number of all."""
    code: Ints

    @property
    def lane(self) -> Ints:
        """Of each instruction."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))

    @property
    def op(self) -> Ints:
        """Of each instruction."""
        return self.code // self.layout.codes.op_unit

    @property
    def paired(self) -> Bits:
        """Which are overlapped with the next one."""
        return self.code // self.layout.codes.pair_unit % 2 == 1

    def stage(self, at: Ints) -> Ints:
        """Of the instructions `at` some places; -1 where the group runs one and it is not said."""
        return self._field(at, 0)

    def microbatch(self, at: Ints) -> Ints:
        """Of the instructions `at` some places."""
        return self._field(at, 1)

    def home(self, at: Ints) -> Ints:
        """Of the instructions `at` some places; -1 for the lane's own."""
        return self._field(at, 2)

    def peer(self, at: Ints) -> Ints:
        """Of the instructions `at` some places; -1 for the lane's own replica."""
        return self._field(at, 3)

    def _field(self, at: Ints, index: int) -> Ints:
        codes = self.layout.codes
        replicas = codes.replicas + 1
        units = ((codes.microbatches + 1) * replicas**2, replicas**2, replicas, 1)
        sizes = (codes.stages + 1, codes.microbatches + 1, replicas, replicas)
        return self.code[at] // units[index] % sizes[index] - 1


def flat_of(plan: Plan, bodies: Mapping[GroupName, Sequence[Instr]]) -> Flat:
    """`bodies` of some groups of `plan` as numbers."""
    placement = placement_of(plan)
    lengths = [len(body) for body in bodies.values()]
    start = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    each = np.fromiter(chain.from_iterable(bodies.values()), np.object_, int(start[-1]))
    # Instructions are often the same object: each is looked at once.
    first, row = distinct(each) if len(each) else (start[:0], start[:0])
    instrs: list[Instr] = each[first].tolist()
    codes = _codes_for(plan, placement, instrs)
    code = np.array([codes.encode(instr) for instr in instrs], np.int64)[row]
    return Flat(Layout(plan, placement, codes, list(bodies)), start, code)


def _codes_for(plan: Plan, placement: Placement, instrs: Collection[Instr]) -> Codes:
    """Codes that have room for `instrs`, whose numbers may be beyond the plan's."""

    def bound(least: int, *names: str) -> int:
        values = [getattr(instr, name) for name in names for instr in instrs]
        return max(least, *(value + 1 for value in values if value is not None), 1)

    return Codes(
        stages=bound(placement.num_stages, "stage"),
        microbatches=bound(plan.batch.microbatches, "microbatch"),
        replicas=bound(plan.mesh.dp, "home", "peer"),
    )


def bodies_of(flat: Flat) -> dict[GroupName, tuple[Instr, ...]]:
    """The streams as instructions; equal ones are one object."""
    known = _Decoded(flat.layout.codes)
    same: dict[bytes, tuple[Instr, ...]] = {}
    bodies: dict[GroupName, tuple[Instr, ...]] = {}
    bounds: list[int] = flat.start.tolist()
    for name, first, end in zip(flat.layout.names, bounds, bounds[1:], strict=False):
        code = flat.code[first:end]
        key = code.tobytes()
        if key not in same:
            same[key] = tuple(map(known.__getitem__, code.tolist()))
        bodies[name] = same[key]
    return bodies


def inserted(flat: Flat, *groups: tuple[Ints, Ints]) -> Flat:
    """`flat` with more instructions: codes, and the place before which each stands.

    Places of one group ascend, and lie inside the lanes: not where one ends and another begins.
    At one place the first group comes first, and then what stood there.
    """
    counts = [np.bincount(place, minlength=len(flat.code)) for place, _ in groups]
    added = np.sum(counts, axis=0, dtype=np.int64)
    before = np.cumsum(added) - added
    num_added = int(added.sum())
    code = np.empty(len(flat.code) + num_added, np.int64)
    code[np.arange(len(flat.code)) + before + added] = flat.code
    taken = np.arange(len(flat.code)) + before
    for (place, codes), count in zip(groups, counts, strict=True):
        rank = np.arange(len(place)) - (np.cumsum(count) - count)[place]
        code[taken[place] + rank] = codes
        taken += count
    total = np.concatenate((before, [num_added]))
    return Flat(flat.layout, flat.start + total[flat.start], code)


class _Decoded(dict[int, Instr]):
    """Instructions by their numbers, each made once."""

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.codes = codes

    def __missing__(self, code: int) -> Instr:
        instr = self[code] = self.codes.decode(code)
        return instr
