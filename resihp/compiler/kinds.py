"""Replicas that do the same, up to the names of their micro-batches.

Where a replica was dropped, every other one may run a micro-batch of it, so that no two streams
are equal, though all replicas with as many do the same. What holds for the first of a kind holds
for all: sizes, times, and which transfers stand where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from resihp.ir.lanes import alike
from resihp.ir.model import Group, GroupName, Instr, Plan, Stream

__all__ = ["Kind", "classes_of", "first_of_each", "for_all", "kinds_of"]

_Name = tuple[int | None, int | None]
"""(home, number) of a micro-batch as instructions hold it."""


class Kind(NamedTuple):
    """Some replicas; the first stands for all."""

    first: int
    names: list[_Name]
    """The micro-batches of the first in the order in which they appear."""
    replicas: dict[int, list[_Name]]
    """What each of them calls these micro-batches; the same list where nothing differs."""


class _Held(NamedTuple):
    """One group of a replica."""

    group: Group
    body: tuple[Instr, ...] | None
    """Of its stream, if it has one."""


def kinds_of(plan: Plan, mark: Callable[[int], object] | None = None) -> list[Kind]:
    """The kinds of replicas of `plan`, by their first one.

    A replica that runs a part of a micro-batch of which others run parts is like no other.
    Replicas of different `mark` are of different kinds.
    """
    classes, marks = _classes(plan, mark)
    held = _held(plan, classes)
    names: dict[int, dict[_Name, int]] = {replica: {} for replica in classes}
    # A single class is one kind, whatever it does.
    shapes = {
        replica: _shape(groups, names[replica]) if len(classes) > 1 else None
        for replica, groups in held.items()
    }
    entangled = _entangled(names)
    kinds: dict[object, Kind] = {}
    for first, members in classes.items():
        known: object = first if first in entangled else (shapes[first], marks.get(first))
        spelled = list(names[first])
        kind = kinds.setdefault(known, Kind(first, spelled, {}))
        same = kind.names if spelled == kind.names else spelled
        kind.replicas.update(dict.fromkeys(members, same))
    return list(kinds.values())


def classes_of(plan: Plan, mark: Callable[[int], object] | None = None) -> list[Kind]:
    """The same, but only replicas that do the same by the same names are of one kind.

    That shows without a look at each instruction.
    """
    classes, _ = _classes(plan, mark, only_shared=True)
    kinds: list[Kind] = []
    for first, members in classes.items():
        names: list[_Name] = []
        kinds.append(Kind(first, names, dict.fromkeys(members, names)))
    return kinds


def first_of_each(plan: Plan, kinds: Sequence[Kind]) -> Plan:
    """`plan` without all other replicas."""
    firsts = {kind.first for kind in kinds}
    streams = tuple(
        msgspec.structs.replace(stream, replicas=kept)
        for stream in plan.streams
        if (kept := tuple(replica for replica in stream.replicas if replica in firsts))
    )
    groups = tuple(group for group in plan.groups if group.replica in firsts)
    return msgspec.structs.replace(plan, groups=groups, streams=streams)


def for_all(plan: Plan, first: Plan, kinds: Sequence[Kind]) -> Plan:
    """`first`, made of `first_of_each` of `plan`, with the streams of all replicas.

    Groups of a position that run the same share a stream; streams come in the order of their
    first groups.
    """
    bodies = {(r, stream.pp): stream.body for stream in first.streams for r in stream.replicas}
    kind_of = {replica: kind for kind in kinds for replica in kind.replicas}
    are_named = any(names is not kind.names for kind in kinds for names in kind.replicas.values())
    known: dict[tuple[Instr, ...], tuple[Instr, ...]] = {}
    by_id: dict[int, tuple[Instr, ...]] = {}
    """Bodies that are in use already. Those of `first` that are equal are one object; with other
    names more can be."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for group in plan.groups:
        kind = kind_of[group.replica]
        body = bodies.get((kind.first, group.pp))
        if body is None:
            continue
        names = kind.replicas[group.replica]
        if names is not kind.names:
            body = _renamed(body, dict(zip(kind.names, names, strict=True)))
        if id(body) not in by_id:
            body = known.setdefault(body, body) if are_named else body
            by_id[id(body)] = body
        replicas.setdefault((group.pp, id(body)), []).append(group.replica)
    streams = tuple(
        Stream(replicas=tuple(members), pp=pp, body=by_id[body])
        for (pp, body), members in replicas.items()
    )
    return msgspec.structs.replace(first, groups=plan.groups, streams=streams)


def _classes(
    plan: Plan, mark: Callable[[int], object] | None, *, only_shared: bool = False
) -> tuple[Mapping[int, Sequence[int]], Mapping[int, object]]:
    """Replicas that are alike and have one mark, by the first of them; and the marks.

    If `only_shared`, those of replicas that are like no other are not looked at.
    """
    classes = alike(plan)
    if mark is None:
        return classes, {}
    marks = {
        replica: mark(replica)
        for members in classes.values()
        if len(members) > 1 or not only_shared
        for replica in members
    }
    split: dict[tuple[int, object], list[int]] = {}
    for first, members in classes.items():
        for member in members:
            split.setdefault((first, marks.get(member)), []).append(member)
    return {members[0]: tuple(members) for members in split.values()}, marks


def _held(plan: Plan, replicas: Mapping[int, object]) -> dict[int, list[_Held]]:
    """The groups of some replicas by position, with their streams."""
    bodies = {
        GroupName(replica, stream.pp): stream.body
        for stream in plan.streams
        for replica in stream.replicas
        if replica in replicas
    }
    held: dict[int, list[_Held]] = {replica: [] for replica in replicas}
    for group in sorted(plan.groups, key=lambda group: group.name):
        if group.replica in replicas:
            held[group.replica].append(_Held(group, bodies.get(group.name)))
    return held


def _shape(held: Sequence[_Held], names: dict[_Name, int]) -> tuple[object, ...]:
    """What a replica does, its micro-batches numbered as they appear; `names` gets the numbers."""
    return tuple(
        (
            group.pp,
            group.layers,
            group.tp,
            None
            if body is None
            else tuple(
                (
                    instr.op,
                    names.setdefault((instr.home, instr.microbatch), len(names)),
                    instr.stage,
                    instr.peer,
                    instr.paired,
                )
                for instr in body
            ),
        )
        for group, body in held
    )


def _entangled(names: Mapping[int, Mapping[_Name, int]]) -> set[int]:
    """Replicas with a micro-batch that another one runs too, or that they name in two ways."""
    runs: dict[_Name, int] = {}
    entangled: set[int] = set()
    for replica, spelled in names.items():
        for home, number in spelled:
            if number is not None:
                other = runs.setdefault((replica if home is None else home, number), replica)
                if other != replica or home == replica:
                    entangled |= {other, replica}
    return entangled


def _renamed(body: Sequence[Instr], names: Mapping[_Name, _Name]) -> tuple[Instr, ...]:
    renamed: list[Instr] = []
    for instr in body:
        old = instr.home, instr.microbatch
        home, number = names.get(old, old)
        if (home, number) != old:
            instr = Instr(instr.op, number, home, instr.stage, instr.peer, instr.paired)
        renamed.append(instr)
    return tuple(renamed)
