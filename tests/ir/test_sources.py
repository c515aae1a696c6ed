"""Where state comes from, held against sets of (layer, quarter) per rank before and after."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placed import placed
from staged_plans import random_staged

from resihp.ir.model import (
    Group,
    LayerRange,
    Load,
    Mesh,
    Move,
    Plan,
    Reshard,
    Restore,
    Resume,
    Source,
)
from resihp.ir.reshard import loads, transfers
from resihp.ir.verify.adaptation import check_adaptation, check_targets
from resihp.ir.verify.findings import Findings

MESH = Mesh(tp=4, pp=2, dp=2)
STEP = 30
seeds = st.integers(0, 10**9).map(random.Random)

Piece = tuple[int, int]
"""(layer, quarter); quarter -1 stands for the tensors that every member holds whole."""
Holdings = dict[int, set[Piece]]


class State(NamedTuple):
    """What every rank holds before, and is to hold after."""

    before: Holdings
    after: Holdings


class Account(NamedTuple):
    """What the lines of a reconfiguration do."""

    came_from: dict[tuple[int, int, int], int | None]
    """(target, layer, quarter) -> source, None for a saved version."""
    faults: list[str]


def holdings(groups: tuple[Group, ...]) -> dict[int, set[Piece]]:
    return {
        rank: {
            (layer, quarter)
            for first, last in group.layers
            for layer in range(first, last + 1)
            for quarter in (-1, *range(4))
            if quarter == -1 or quarter * group.tp // 4 == index
        }
        for group in groups
        for index, rank in enumerate(group.ranks)
    }


def quarters(held: Holdings, rank: int, layer: int) -> set[int]:
    return {quarter for at, quarter in held.get(rank, set()) if at == layer}


def layers_of(line: Source) -> range:
    return range(line.layers.first, line.layers.last + 1)


def ends_of(previous: Plan, plan: Plan, line: Source) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks that a line takes from and gives to."""
    if isinstance(line, Move):
        return (line.source,), (line.target,)
    target = plan.group(*line.target)
    if isinstance(line, Restore):
        return (line.source,), () if target is None else target.ranks
    source = previous.group(*line.source) if isinstance(line, Reshard) else None
    return () if source is None else source.ranks, () if target is None else target.ranks


def fault_of(
    plan: Plan, line: Source, sources: tuple[int, ...], targets: tuple[int, ...], state: State
) -> str | None:
    """Why a line cannot be right, whatever the others say."""
    layers = layers_of(line)
    if isinstance(line, Restore) and (line.source not in plan.lost or line.giver in plan.lost):
        return "snapshot"
    if not all(quarters(state.after, rank, layer) for rank in targets for layer in layers):
        return "target"
    if isinstance(line, Load):
        return None if line.step == STEP else "version"
    if not all(quarters(state.before, rank, layer) for rank in sources for layer in layers):
        return "source"
    if isinstance(line, Move):
        held = quarters(state.before, line.source, layers[0])
        return None if held == quarters(state.after, line.target, layers[0]) else "unlike"
    return None


def account(previous: Plan, plan: Plan) -> Account:
    """Line by line and rank by rank: who takes what from whom."""
    state = State(holdings(previous.groups), holdings(plan.groups))
    missing = {rank: pieces - state.before.get(rank, set()) for rank, pieces in state.after.items()}
    came_from: dict[tuple[int, int, int], int | None] = {}
    members = {rank: index for g in plan.groups for index, rank in enumerate(g.ranks)}
    faults: list[str] = []
    seen: Counter[tuple[object, object, int]] = Counter()
    for line in plan.reconfigure:
        sources, targets = ends_of(previous, plan, line)
        fault = fault_of(plan, line, sources, targets, state)
        if fault is not None:
            faults.append(fault)
            continue
        useful = False
        for layer in layers_of(line):
            seen[getattr(line, "source", None), line.target, layer] += 1
            for rank in targets:
                for quarter in sorted(quarters(missing, rank, layer)):
                    alive = [
                        line.giver if isinstance(line, Restore) else source
                        for source in sources
                        if (isinstance(line, Restore) or source not in plan.lost)
                        and quarter in quarters(state.before, source, layer)
                    ]
                    if alive or isinstance(line, Load):
                        # What all members have whole comes from all of them in turn.
                        member = members[rank] if quarter < 0 else 0
                        giver = alive[member % len(alive)] if alive else None
                        came_from[rank, layer, quarter] = giver
                        missing[rank].remove((layer, quarter))
                        useful = useful or quarter >= 0
        if not useful:
            faults.append("needless")
    faults += ["missing" for pieces in missing.values() if pieces]
    faults += ["twice" for times in seen.values() if times > 1]
    return Account(came_from, faults)


def next_plan(rng: random.Random, previous: Plan) -> Plan:
    """Other groups on the ranks that are left, with lines that may be right."""
    lost = tuple(sorted(rng.sample(range(MESH.world), rng.choice((0, 1, 1, 2, 4)))))
    alive = [rank for rank in range(MESH.world) if rank not in lost]
    plan = previous
    if rng.random() < 0.7:
        plan = random_staged(rng, MESH).plan
    while sum(group.tp for group in plan.groups) > len(alive):
        plan = random_staged(rng, MESH).plan
    kept = {rank for group in plan.groups for rank in group.ranks if rank in alive}
    free = [rank for rank in alive if rank not in kept]
    rng.shuffle(free)
    groups = tuple(
        msgspec.structs.replace(
            group,
            ranks=tuple(r if r in kept else free.pop() for r in group.ranks),
        )
        for group in plan.groups
    )
    used = {rank for group in groups for rank in group.ranks}
    plan = msgspec.structs.replace(
        plan,
        groups=groups,
        lost=lost,
        standby=tuple(rank for rank in alive if rank not in used),
        resume=Resume(step=STEP),
        batch=previous.batch,
    )
    return msgspec.structs.replace(plan, reconfigure=tuple(some_lines(rng, previous, plan)))


def some_lines(rng: random.Random, previous: Plan, plan: Plan) -> list[Source]:
    """For each range that somebody lacks, a few lines; then perhaps one change."""
    before = holdings(previous.groups)
    lines: list[Source] = []
    for group in plan.groups:
        for layers in group.layers:
            for layer in range(layers.first, layers.last + 1):
                lines += lines_for(rng, previous, plan, group, LayerRange(layer, layer), before)
    if lines and rng.random() < 0.4:
        at = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2:
                lines[at] = msgspec.structs.replace(
                    lines[at], layers=LayerRange(lines[at].layers.first, rng.randrange(8) | 7)
                )
            case _:
                other = rng.choice(lines)
                lines[at] = msgspec.structs.replace(lines[at], layers=other.layers)
    return lines


def lines_for(
    rng: random.Random,
    previous: Plan,
    plan: Plan,
    group: Group,
    layers: LayerRange,
    before: Holdings,
) -> list[Source]:
    after = holdings((group,))
    lacking = {
        rank: {p for p in pieces if p[0] == layers.first} - before.get(rank, set())
        for rank, pieces in after.items()
    }
    lines: list[Source] = []
    sources = [g for g in previous.groups if any(a <= layers.first <= b for a, b in g.layers)]
    rng.shuffle(sources)
    dead = [rank for rank in plan.lost if quarters(before, rank, layers.first)]
    while any(lacking.values()):
        rank = rng.choice([rank for rank in group.ranks if lacking[rank]])
        twins = [
            r
            for r in before
            if quarters(before, r, layers.first) == quarters(after, rank, layers.first)
            and r not in plan.lost
            and previous.group_of(r) is not None
        ]
        if twins and rng.random() < 0.3:
            lines.append(Move(layers=layers, source=rng.choice(twins), target=rank))
            lacking[rank] = set()
        elif dead and rng.random() < 0.5:
            source = dead.pop()
            giver = rng.choice([r for r in range(MESH.world) if r not in plan.lost])
            if rng.random() < 0.05:
                giver = source
            lines.append(Restore(layers=layers, source=source, giver=giver, target=group.name))
            lacking = {rank: pieces - before[source] for rank, pieces in lacking.items()}
        elif sources:
            source = sources.pop()
            lines.append(Reshard(layers=layers, source=source.name, target=group.name))
            live = {p for r in source.ranks if r not in plan.lost for p in before[r]}
            lacking = {rank: pieces - live for rank, pieces in lacking.items()}
        else:
            step = STEP if rng.random() < 0.9 else STEP - 1
            lines.append(Load(layers=layers, step=step, target=group.name))
            break
    return lines


@given(seeds)
@settings(max_examples=300, deadline=None)
def test_reconfigurations_are_right_exactly_where_the_account_says(rng: random.Random):
    """Findings where it finds faults; otherwise the same source for every piece."""
    previous = random_staged(rng, MESH).plan
    plan = next_plan(rng, previous)
    came_from, faults = account(previous, plan)
    parsed, findings = placed(plan), Findings()
    check_targets(parsed, findings)
    check_adaptation(parsed, previous, findings)
    found = [finding.code for finding in findings.sorted()]
    event("faulty" if faults else "right")
    assert bool(found) == bool(faults), (found, faults)
    if not faults:
        given = {
            (move.target, move.layer, -1 if move.replicated else move.chunk): move.source
            for move in transfers(previous, plan)
        }
        read = [
            (load.target, load.layer, -1 if load.replicated else load.chunk)
            for load in loads(previous, plan)
        ]
        assert not set(given) & set(read)
        assert given | dict.fromkeys(read) == came_from
        snapshots = {m.source: m.snapshot_of for m in transfers(previous, plan) if m.snapshot_of}
        assert set(snapshots.values()) <= set(plan.lost)
