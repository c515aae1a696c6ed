"""Small jobs, the verifier as a judge, and slow obvious oracles for schedules and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from resihp.compiler import Work, facts_of, initial_plan
from resihp.compiler.cluster import CLUSTERS, Link
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.model import Batch, GroupName, Mesh, ModelShape, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.printer import print_plan
from resihp.ir.reshard import transfers
from resihp.ir.statements import spell_instr
from resihp.ir.verify import verify

ONE_STAGE_SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules with one stage per position."""
_FREE = Link(gb_per_s=1e9, latency_us=1e-6)
FREE_LINKS = msgspec.structs.replace(CLUSTERS["cpu-box"], intra_node=_FREE, inter_node=_FREE)
"""For tiny models: their exchange in a TP group takes longer than what it saves elsewhere."""
UNIT_COST = {Op.F: 1, Op.B: 1, Op.W: 1, Op.BW: 2}


def model_of(layers: int = 6, kv_heads: int = 8) -> ModelShape:
    return ModelShape(
        name="tiny", layers=layers, hidden=64, heads=8, kv_heads=kv_heads, ffn=96, vocab=272
    )


def plan_of(
    tp: int = 2,
    pp: int = 2,
    dp: int = 2,
    microbatches: int = 4,
    schedule: str = "zb-h1",
    memory_bytes: int | None = 1 << 30,
) -> Plan:
    return initial_plan(
        model_of(layers=max(6, 2 * pp)),
        Mesh(tp=tp, pp=pp, dp=dp),
        Batch(microbatches=microbatches, tokens=32),
        schedule=schedule,
        memory_bytes=memory_bytes,
    )


def streams_of(plan: Plan) -> dict[str, list[str]]:
    """The lines of the stream of each group, pairs on one line."""
    spelled = {
        str(GroupName(replica, stream.pp)): "\n".join(
            spell_instr(instr) + (" &" if instr.paired else "") for instr in stream.body
        )
        for stream in plan.streams
        for replica in stream.replicas
    }
    return {name: text.replace("&\n", "& ").split("\n") for name, text in spelled.items()}


def findings(plan: Plan, previous: Plan | None = None) -> list[Diagnostic]:
    """What the verifier says of the plan's text, warnings included."""
    parsed = parse(print_plan(plan))
    assert parsed.plan == plan
    return verify(parsed, previous=previous, facts=facts_of(plan))


def makespan(orders: Sequence[Sequence[Work]], cost: Mapping[Op, int] = UNIT_COST) -> int:
    """When the last position is done if transfers take no time."""
    return max(end for _, end in spans(orders, cost))


def spans(
    orders: Sequence[Sequence[Work]], cost: Mapping[Op, int] = UNIT_COST
) -> list[tuple[int, int]]:
    """When each position begins and ends: the obvious simulation, with transfers in no time."""
    begins: list[int | None] = [None] * len(orders)
    last = max(work.stage for order in orders for work in order)
    ends: dict[tuple[Op, int, int], int] = {}
    clocks, positions = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for position, order in enumerate(orders):
            while positions[position] < len(order):
                op, stage, number = order[positions[position]]
                needs = {
                    Op.F: (Op.F, stage - 1, number) if stage else None,
                    Op.B: (Op.B, stage + 1, number),
                    Op.BW: (Op.BW, stage + 1, number),
                    Op.W: (Op.B, stage, number),
                }[op]
                if op in (Op.B, Op.BW) and stage == last:
                    needs = (Op.F, stage, number)
                if needs is not None and needs not in ends:
                    break
                start = max(clocks[position], ends[needs] if needs is not None else 0)
                if begins[position] is None:
                    begins[position] = start
                clocks[position] = start + cost[op]
                ends[op, stage, number] = clocks[position]
                positions[position] += 1
                moved = True
    assert positions == [len(order) for order in orders], "the orders wait for each other"
    return [(begin or 0, end) for begin, end in zip(begins, clocks, strict=True)]


def chunks_by_rank(plan: Plan) -> dict[int, dict[int, set[int]]]:
    """rank -> layer -> chunks of mesh.tp, as the groups say."""
    share = {group.name: plan.mesh.tp // group.tp for group in plan.groups}
    return {
        rank: {
            layer: set(range(index * share[group.name], (index + 1) * share[group.name]))
            for first, last in group.layers
            for layer in range(first, last + 1)
        }
        for group in plan.groups
        for index, rank in enumerate(group.ranks)
    }


def lacking(previous: Plan, plan: Plan) -> set[tuple[int, int, int]]:
    """(rank, layer, chunk) that `plan` wants and its ranks lack once the moves are done.

    Each move must come from a live holder and bring what was not there.
    """
    before = chunks_by_rank(previous)
    after = {(r, n, c) for r, layers in before.items() for n, cs in layers.items() for c in cs}
    for move in transfers(previous, plan):
        assert move.source not in plan.lost
        if not move.replicated:
            assert move.chunk in before[move.source][move.layer]
            assert (move.target, move.layer, move.chunk) not in after, "moved where it is already"
            after.add((move.target, move.layer, move.chunk))
    wanted = chunks_by_rank(plan)
    return {
        (r, n, c) for r, layers in wanted.items() for n, cs in layers.items() for c in cs
    } - after


def work_of(plan: Plan) -> dict[tuple[int, int, int], int]:
    """(stage, home, number) -> how often its weight gradient is computed."""
    counts: dict[tuple[int, int, int], int] = {}
    placement = placement_of(plan)
    for stream in plan.streams:
        for replica in stream.replicas:
            for instr in stream.body:
                if instr.op in (Op.W, Op.BW):
                    assert instr.microbatch is not None
                    home = replica if instr.home is None else instr.home
                    stage = placement.stage_of(stream.pp, instr)
                    assert stage is not None
                    key = (stage, home, instr.microbatch)
                    counts[key] = counts.get(key, 0) + 1
    return counts
