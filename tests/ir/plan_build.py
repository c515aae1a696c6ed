"""Small plans for tests: 1F1B and GPipe orders for any mesh, TP degree per group, lost replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Mesh,
    ModelShape,
    Op,
    Plan,
    Stream,
)

MODEL = ModelShape(name="tiny", layers=8, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=128)


def make_plan(
    *,
    pp: int = 2,
    dp: int = 1,
    tp: int = 1,
    microbatches: int = 4,
    order: str = "1f1b",
    split: bool = False,
    degrees: Mapping[GroupName, int] | None = None,
    gone: Mapping[int, int] | None = None,
    scatter: bool = False,
    memory_bytes: int | None = None,
    share: bool = False,
) -> Plan:
    """A valid plan.

    `split` uses B and W instead of BW; `degrees` gives groups fewer ranks than `tp` (the rest is
    standby); `gone` maps a lost replica to the one that runs its micro-batches; `scatter` cuts
    transfers between equal degrees too; `share` writes one stream for replicas that do the same.
    """
    degrees, gone = degrees or {}, gone or {}
    mesh = Mesh(tp=tp, pp=pp, dp=dp)
    groups = tuple(
        _group(mesh, GroupName(replica, stage), degrees)
        for replica in range(dp)
        if replica not in gone
        for stage in range(pp)
    )
    streams = tuple(
        Stream(
            replicas=(group.replica,),
            pp=group.pp,
            body=tuple(
                _body(
                    group,
                    groups,
                    pp,
                    _queue(group.replica, microbatches, gone),
                    order,
                    split,
                    scatter,
                )
            ),
        )
        for group in groups
    )
    used = {rank for group in groups for rank in group.ranks}
    lost = tuple(
        rank for rank in range(mesh.world) if rank not in used and rank // (tp * pp) in gone
    )
    standby = tuple(rank for rank in range(mesh.world) if rank not in used and rank not in lost)
    return Plan(
        model=MODEL,
        mesh=mesh,
        batch=Batch(microbatches=microbatches, tokens=16),
        groups=groups,
        streams=_shared(streams) if share else streams,
        standby=standby,
        lost=lost,
        memory_bytes=memory_bytes,
    )


def _shared(streams: Sequence[Stream]) -> tuple[Stream, ...]:
    replicas: dict[tuple[int, tuple[Instr, ...]], list[int]] = {}
    for stream in streams:
        replicas.setdefault((stream.pp, stream.body), []).extend(stream.replicas)
    return tuple(
        Stream(replicas=tuple(members), pp=stage, body=body)
        for (stage, body), members in replicas.items()
    )


def _group(mesh: Mesh, name: GroupName, degrees: Mapping[GroupName, int]) -> Group:
    first = (name.replica * mesh.pp + name.pp) * mesh.tp
    share = MODEL.layers // mesh.pp
    last = MODEL.layers - 1 if name.pp == mesh.pp - 1 else (name.pp + 1) * share - 1
    return Group(
        replica=name.replica,
        pp=name.pp,
        ranks=tuple(range(first, first + degrees.get(name, mesh.tp))),
        layers=(LayerRange(name.pp * share, last),),
    )


def _queue(
    replica: int, microbatches: int, gone: Mapping[int, int]
) -> list[tuple[int, int | None]]:
    own: list[tuple[int, int | None]] = [(number, None) for number in range(microbatches)]
    return own + [
        (number, home)
        for home, runs_on in gone.items()
        if runs_on == replica
        for number in range(microbatches)
    ]


def _body(
    group: Group,
    groups: Sequence[Group],
    pp: int,
    queue: list[tuple[int, int | None]],
    order: str,
    split: bool,
    scatter: bool,
) -> Iterator[Instr]:
    tp = {(other.replica, other.pp): other.tp for other in groups}
    up, down = (tp.get((group.replica, group.pp + step)) for step in (-1, 1))
    for kind, item in _order(len(queue), pp - group.pp - 1, order):
        micro_batch = queue[item]
        before, after = (up, down) if kind == "F" else (down, up)
        suffix = "ACT" if kind == "F" else "GRAD"
        if before is not None:
            yield Instr(Op[f"RECV_{suffix}"], *micro_batch)
            if scatter or before != group.tp:
                yield Instr(Op[f"GATHER_{suffix}"], *micro_batch)
        yield Instr(Op.F if kind == "F" else (Op.B if split else Op.BW), *micro_batch)
        if after is not None:
            if scatter or after != group.tp:
                yield Instr(Op[f"SCATTER_{suffix}"], *micro_batch)
            yield Instr(Op[f"SEND_{suffix}"], *micro_batch)
        if kind == "B" and split:
            yield Instr(Op.W, *micro_batch)
    yield Instr(Op.REDUCE_GRADS)
    yield Instr(Op.STEP)


def _order(num_items: int, num_after: int, order: str) -> Iterator[tuple[str, int]]:
    warm_up = num_items if order == "gpipe" else min(num_after, num_items)
    for item in range(warm_up):
        yield "F", item
    for item in range(num_items):
        if warm_up + item < num_items:
            yield "F", warm_up + item
        yield "B", item
