"""Plans that can be written down, valid or not, for round trips."""

from __future__ import annotations

from hypothesis import strategies as st

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
    Reshard,
    Resume,
    Stream,
)

numbers = st.one_of(st.integers(0, 12), st.integers(0, 10**9))
places = st.builds(GroupName, st.integers(0, 999_999_999), st.integers(0, 40))
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+/\-]{0,12}", fullmatch=True)
lists = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 10**9)), min_size=1, max_size=8)
rank_lists = lists.map(tuple)
layer_ranges = st.tuples(numbers, numbers).map(lambda ends: LayerRange(*sorted(ends)))

instructions = st.one_of(
    st.builds(
        Instr,
        st.sampled_from([op for op in Op if op.has_micro_batch]),
        numbers,
        st.none() | numbers,
    ),
    st.builds(Instr, st.sampled_from([Op.REDUCE_GRADS, Op.STEP])),
)
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
    layers=layer_ranges.map(lambda layers: (layers,)),
)
streams = st.builds(
    Stream,
    replicas=rank_lists,
    pp=numbers,
    body=st.lists(instructions, max_size=12).map(tuple),
)
plans = st.builds(
    Plan,
    model=models,
    mesh=st.builds(Mesh, tp=numbers, pp=numbers, dp=numbers),
    batch=st.builds(Batch, microbatches=numbers, tokens=numbers),
    groups=st.lists(groups, max_size=4).map(tuple),
    streams=st.lists(streams, max_size=3).map(tuple),
    schedule=st.none() | names,
    memory_bytes=st.none() | st.integers(0, 1 << 45) | st.integers(0, 64).map(lambda n: n << 30),
    resume=st.none() | st.builds(Resume, step=numbers),
    standby=st.just(()) | rank_lists,
    lost=st.just(()) | rank_lists,
    reconfigure=st.lists(
        st.builds(Reshard, layers=layer_ranges, source=places, target=places), max_size=3
    ).map(tuple),
)
