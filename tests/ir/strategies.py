"""Plans that can be written down, valid or not, for round trips."""

from __future__ import annotations

from itertools import chain

from hypothesis import strategies as st
from msgspec.structs import replace

from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    Instr,
    LayerRange,
    Level,
    Load,
    Mesh,
    MicroBatch,
    ModelShape,
    Move,
    Op,
    Plan,
    Reshard,
    Restore,
    Resume,
    Stream,
)
from resihp.ir.transport import EDGE, Transport

none = st.none()
numbers = st.one_of(st.integers(0, 12), st.integers(0, 10**9))
places = st.builds(GroupName, st.integers(0, 999_999_999), st.integers(0, 40))
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+/\-]{0,12}", fullmatch=True)
lists = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 10**9)), min_size=1, max_size=8)
rank_lists = lists.map(tuple)
layer_ranges = st.tuples(numbers, numbers).map(lambda ends: LayerRange(*sorted(ends)))

optional = st.none() | numbers


def _with_micro_batch(*ops: Op, peer: st.SearchStrategy[int | None] = none):
    return st.builds(Instr, st.sampled_from(ops), numbers, optional, optional, peer)


computes = _with_micro_batch(*(op for op in Op if op.is_compute))
transfers = _with_micro_batch(*(op for op in Op if op.is_transfer), peer=optional)
cuts = _with_micro_batch(Op.SCATTER_ACT, Op.GATHER_ACT, Op.SCATTER_GRAD, Op.GATHER_GRAD)
of_stages = st.builds(
    Instr,
    st.sampled_from([Op.REDUCE_GRADS, Op.GATHER_PARAMS, Op.FREE_PARAMS]),
    none,
    none,
    optional,
)
instructions = st.one_of(computes, transfers, cuts, of_stages, st.just(Instr(Op.STEP)))
"""Single ones: no pairs."""
pairs = st.tuples(computes.map(lambda instr: replace(instr, paired=True)), computes)


def bodies(single: st.SearchStrategy[Instr]) -> st.SearchStrategy[tuple[Instr, ...]]:
    """What a stream may hold whose instructions come from `single`, and pairs."""
    lines = st.one_of(single.map(lambda instr: (instr,)), pairs)
    return st.lists(lines, max_size=12).map(lambda lines: tuple(chain.from_iterable(lines)))


models = st.builds(
    ModelShape,
    name=names,
    layers=numbers,
    hidden=numbers,
    heads=numbers,
    kv_heads=numbers,
    ffn=numbers,
    vocab=numbers,
)
groups = st.builds(
    Group,
    replica=numbers.filter(lambda n: n < 10**9),
    pp=st.integers(0, 99),
    ranks=rank_lists,
    layers=st.lists(layer_ranges, min_size=1, max_size=4).map(tuple),
)
sources = st.one_of(
    st.builds(Reshard, layers=layer_ranges, source=places, target=places),
    st.builds(Move, layers=layer_ranges, source=numbers, target=numbers),
    st.builds(Restore, layers=layer_ranges, source=numbers, giver=numbers, target=places),
    st.builds(Load, layers=layer_ranges, step=numbers, target=places),
)
kept = st.lists(st.builds(MicroBatch, home=numbers, number=numbers), max_size=6).map(tuple)
byte_counts = st.integers(0, 1 << 45) | st.integers(0, 64).map(lambda n: n << 30)
precisions = st.sampled_from(["fp32", "bf16"])
transports = st.one_of(
    st.sampled_from([EDGE, Transport("pair"), Transport("rank")]),
    st.builds(Transport, st.just("eager"), byte_counts),
).map(str)


def _texts(level: Level, single: st.SearchStrategy[Instr]) -> st.SearchStrategy[Plan]:
    streams = st.builds(Stream, replicas=rank_lists, pp=numbers, body=bodies(single))
    return st.builds(
        Plan,
        model=models,
        mesh=st.builds(Mesh, tp=numbers, pp=numbers, dp=numbers),
        batch=st.builds(Batch, microbatches=numbers, tokens=numbers),
        groups=st.lists(groups, max_size=4).map(tuple),
        streams=st.lists(streams, max_size=3).map(tuple),
        schedule=st.none() | names,
        memory_bytes=st.none() | byte_counts,
        resume=st.none() | st.builds(Resume, step=numbers, keep=kept),
        standby=st.just(()) | rank_lists,
        lost=st.just(()) | rank_lists,
        returned=st.just(()) | rank_lists,
        reconfigure=st.lists(sources, max_size=3).map(tuple),
        transport=st.none() | transports,
        precision=precisions,
        recompute=st.just(()) | rank_lists,
        level=st.just(level),
    )


schedules = _texts(Level.SCHEDULE, computes)
plans = st.one_of(_texts(Level.PLAN, instructions), schedules)
"""Plans and schedules."""
