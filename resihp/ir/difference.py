"""What changed in meaning from one plan to another, whatever the texts look like.

Streams are compared instruction by instruction with micro-batches, stages and other ends named
absolutely, so that `F[0] 0@0` in a stream of replica 0 is `F 0`, and replicas that share a stream
are looked at alone. Neither plan needs to be right; where a group or a stream is given twice the
first one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from resihp.ir.lanes import EDGES, Edge, Lane, Task
from resihp.ir.model import Group, GroupName, MicroBatch, Op, Plan
from resihp.ir.source import Parsed
from resihp.ir.statements import columns_of, spell_kept, spell_layers, spell_numbers, spell_size
from resihp.ir.view import View, view_of

__all__ = [
    "CutChange",
    "Difference",
    "FieldChange",
    "GroupChange",
    "GroupState",
    "MicroBatchMove",
    "OrderChange",
    "Position",
    "RankMove",
    "SourceChange",
    "compare",
]

_CUTS = frozenset(op for edge in EDGES for op in (edge.scatter, edge.gather))


class FieldChange(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a line about the whole job, such as `batch microbatches`; None: not given."""

    field: str
    before: str | None
    after: str | None


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """What a group is in one of the plans."""

    tp: int
    ranks: tuple[int, ...]
    layers: str


class GroupChange(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is new (no `before`), gone (no `after`), or differs."""

    group: str
    before: GroupState | None
    after: GroupState | None


class RankMove(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that went from one place to another: a group, `standby`, `lost` or `nowhere`."""

    ranks: tuple[int, ...]
    before: str
    after: str


class MicroBatchMove(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-batches of `home` that another replica runs now; None: no replica runs them.

    `stages` are numbered as in the new plan, or as in the old one where the new has fewer.
    """

    home: int
    microbatches: tuple[int, ...]
    stages: tuple[int, ...]
    before: int | None
    after: int | None


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """An instruction: its number in the stream, from 0, and its line in the text."""

    instr: str
    index: int
    line: int


class OrderChange(msgspec.Struct, frozen=True, kw_only=True):
    """Where the streams of a position first part; None: the stream has ended there.

    Scatters and gathers that come or go are a `CutChange` and no difference here.
    """

    pp: int
    replicas: tuple[int, ...]
    before: Position | None
    after: Position | None
    num_removed: int
    """Instructions that only the old stream has."""
    num_added: int
    """Instructions that only the new stream has; 0 and 0: the order alone differs."""


class CutChange(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers that cross in chunks now and crossed whole before, or the other way round."""

    sender: str
    receiver: str
    what: str
    """`activation` or `gradient`."""
    num_transfers: int
    scattered: bool
    """How they cross now."""


class SourceChange(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the reconfigure block that only one of the plans has."""

    line: str
    added: bool


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changed; all empty for plans of the same meaning."""

    fields: tuple[FieldChange, ...]
    groups: tuple[GroupChange, ...]
    ranks: tuple[RankMove, ...]
    micro_batches: tuple[MicroBatchMove, ...]
    order: tuple[OrderChange, ...]
    transfers: tuple[CutChange, ...]
    sources: tuple[SourceChange, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans mean the same."""
        return not any(getattr(self, field) for field in self.__struct_fields__)


def compare(old: Parsed, new: Parsed) -> Difference:
    """What `new` says that `old` did not, and the other way round."""
    before, after = _without_what_is_alike(
        *(view_of(parsed, every_replica=True) for parsed in (old, new))
    )
    return Difference(
        fields=tuple(_fields(old.plan, new.plan)),
        groups=tuple(_groups(old.plan, new.plan)),
        ranks=tuple(_ranks(old.plan, new.plan)),
        micro_batches=tuple(_micro_batches(before, after)),
        order=tuple(_orders(before, after)),
        transfers=tuple(_cuts(before, after)),
        sources=tuple(_sources(old.plan, new.plan)),
    )


def _without_what_is_alike(before: View, after: View) -> tuple[View, View]:
    """Both without the lanes that run the same stages in the same way: nothing changed there."""
    meanings = [(v.placement.stages, v.plan.mesh, v.plan.batch) for v in (before, after)]
    if meanings[0] != meanings[1]:
        return before, after
    bodies: dict[tuple[int, int], bool] = {}

    def is_alike(name: GroupName) -> bool:
        here, there = before.lanes.get(name), after.lanes.get(name)
        if here is None or there is None:
            return False
        key = id(here.body), id(there.body)
        if key not in bodies:
            bodies[key] = here.body == there.body
        return bodies[key]

    alike = {name for name in before.lanes if is_alike(name)}
    kept = (
        view._replace(lanes={name: lane for name, lane in view.lanes.items() if name not in alike})
        for view in (before, after)
    )
    return next(kept), next(kept)


# --- the job ---------------------------------------------------------------------------------


def _fields(old: Plan, new: Plan) -> Iterator[FieldChange]:
    before, after = dict(_values(old)), dict(_values(new))
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field):
            yield FieldChange(field=field, before=before.get(field), after=after.get(field))


def _values(plan: Plan) -> Iterator[tuple[str, str]]:
    for line, struct in (("model", plan.model), ("mesh", plan.mesh), ("batch", plan.batch)):
        for key in struct.__struct_fields__:
            yield f"{line} {key}", str(getattr(struct, key))
    yield "level", plan.level
    if plan.schedule is not None:
        yield "order", plan.schedule
    if plan.memory_bytes is not None:
        yield "memory", spell_size(plan.memory_bytes)
    if plan.transport is not None:
        yield "transport", plan.transport
    if plan.precision != "fp32":
        yield "precision", plan.precision
    if plan.recompute:
        yield "recompute", spell_numbers(plan.recompute)
    if plan.resume is not None:
        yield "resume step", str(plan.resume.step)
        if plan.resume.keep:
            yield "resume keep", spell_kept(plan.resume.keep)
    if plan.returned:
        yield "returned", spell_numbers(plan.returned)


# --- groups and ranks ------------------------------------------------------------------------


def _groups(old: Plan, new: Plan) -> Iterator[GroupChange]:
    before, after = _states(old), _states(new)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield GroupChange(group=str(name), before=before.get(name), after=after.get(name))


def _states(plan: Plan) -> dict[GroupName, GroupState]:
    states: dict[GroupName, GroupState] = {}
    for group in plan.groups:
        states.setdefault(group.name, _state(group))
    return states


def _state(group: Group) -> GroupState:
    return GroupState(tp=group.tp, ranks=group.ranks, layers=spell_layers(group.layers))


def _ranks(old: Plan, new: Plan) -> Iterator[RankMove]:
    """Ranks with the same move together, in order of their first one."""
    before, after = _places(old), _places(new)
    moved: dict[tuple[str, str], list[int]] = {}
    for rank in sorted({*before, *after}):
        places = before.get(rank, "nowhere"), after.get(rank, "nowhere")
        if places[0] != places[1]:
            moved.setdefault(places, []).append(rank)
    for (source, target), ranks in moved.items():
        yield RankMove(ranks=tuple(ranks), before=source, after=target)


def _places(plan: Plan) -> dict[int, str]:
    places = {rank: str(group.name) for group in plan.groups for rank in group.ranks}
    return places | dict.fromkeys(plan.standby, "standby") | dict.fromkeys(plan.lost, "lost")


# --- micro-batches ---------------------------------------------------------------------------


def _micro_batches(before: View, after: View) -> Iterator[MicroBatchMove]:
    ran, runs = _runners(before), _runners(after)
    stages: dict[tuple[MicroBatch, int | None, int | None], list[int]] = {}
    for task in sorted({*ran, *runs}):
        replicas = ran.get(task), runs.get(task)
        if replicas[0] != replicas[1]:
            stages.setdefault((task.micro_batch, *replicas), []).append(task.stage)
    together: dict[tuple[int, int | None, int | None, tuple[int, ...]], list[int]] = {}
    for (micro_batch, source, target), at in stages.items():
        key = micro_batch.home, source, target, tuple(at)
        together.setdefault(key, []).append(micro_batch.number)
    for (home, source, target, at), numbers in together.items():
        yield MicroBatchMove(
            home=home, microbatches=tuple(numbers), stages=at, before=source, after=target
        )


def _runners(view: View) -> dict[Task, int]:
    """The replica that runs the forward of each micro-batch at each stage."""
    runners: dict[Task, int] = {}
    for lane in view.lanes.values():
        for op, task in lane.first:
            if op is Op.F:
                runners.setdefault(task, lane.name.replica)
    return runners


# --- order -----------------------------------------------------------------------------------


def _orders(before: View, after: View) -> Iterator[OrderChange]:
    """Replicas whose streams part in the same way together."""
    found: dict[OrderChange, list[int]] = {}
    for name, lane in before.lanes.items():
        other = after.lanes.get(name)
        if other is not None:
            change = _order_of(before, after, lane, other)
            if change is not None:
                found.setdefault(change, []).append(name.replica)
    for change, replicas in found.items():
        yield msgspec.structs.replace(change, replicas=tuple(replicas))


def _order_of(before: View, after: View, lane: Lane, other: Lane) -> OrderChange | None:
    here, there = list(_keys(lane)), list(_keys(other))
    if here == there:
        return None
    only_here, only_there = Counter(here) - Counter(there), Counter(there) - Counter(here)
    ours = [at for at, key in enumerate(here) if not _is_cut_change(key, only_here)]
    theirs = [at for at, key in enumerate(there) if not _is_cut_change(key, only_there)]
    part = next(
        (
            number
            for number, (at, to) in enumerate(zip(ours, theirs, strict=False))
            if here[at] != there[to]
        ),
        min(len(ours), len(theirs)),
    )
    if part == len(ours) == len(theirs):
        return None
    return OrderChange(
        pp=lane.name.pp,
        replicas=(),
        before=_position(before, lane, ours[part : part + 1]),
        after=_position(after, other, theirs[part : part + 1]),
        num_removed=sum(n for (op, *_), n in only_here.items() if op not in _CUTS),
        num_added=sum(n for (op, *_), n in only_there.items() if op not in _CUTS),
    )


_Key = tuple[Op, object, int | None, bool]


def _keys(lane: Lane) -> Iterator[_Key]:
    """Each instruction as what it means, whichever replica runs it."""
    for index, (instr, task) in enumerate(zip(lane.body, lane.tasks, strict=True)):
        stage = lane.placement.stage_of(lane.name.pp, instr)
        as_written = (instr.stage if stage is None else stage, instr.microbatch, instr.home)
        peer = lane.peer(index) if instr.op.is_transfer else None
        yield instr.op, as_written if task is None else task, peer, instr.paired


def _is_cut_change(key: _Key, only: Counter[_Key]) -> bool:
    return key[0] in _CUTS and only[key] > 0


def _position(view: View, lane: Lane, at: Sequence[int]) -> Position | None:
    if not at:
        return None
    (index,) = at
    text = lane.text_of_pair(index).strip("`")
    return Position(instr=text, index=index, line=view.line(lane, index))


# --- transfers -------------------------------------------------------------------------------


def _cuts(before: View, after: View) -> Iterator[CutChange]:
    """Transfers that both plans have between the same groups, by how they cross."""
    for name, sender in after.lanes.items():
        was = before.lanes.get(name)
        if was is None:
            continue
        for edge in EDGES:
            then, now = dict(_crossings(was, edge)), dict(_crossings(sender, edge))
            changed = Counter(way for key, way in now.items() if then.get(key, way) != way)
            for (receiver, scattered), num_transfers in sorted(changed.items()):
                yield CutChange(
                    sender=str(name),
                    receiver=str(receiver),
                    what=edge.what,
                    num_transfers=num_transfers,
                    scattered=scattered,
                )


def _crossings(
    sender: Lane, edge: Edge
) -> Iterator[tuple[tuple[Task, GroupName], tuple[GroupName, bool]]]:
    """Where each tensor goes, and whether it is scattered."""
    for (op, task), index in sender.first.items():
        far_end = sender.far_end(index) if op is edge.send else None
        if far_end is not None:
            yield (task, far_end[0]), (far_end[0], (edge.scatter, task) in sender.first)


# --- reconfiguration -------------------------------------------------------------------------


def _sources(old: Plan, new: Plan) -> Iterator[SourceChange]:
    for line in old.reconfigure:
        if line not in new.reconfigure:
            yield SourceChange(line=" ".join(columns_of(line)), added=False)
    for line in new.reconfigure:
        if line not in old.reconfigure:
            yield SourceChange(line=" ".join(columns_of(line)), added=True)
