"""The parity grid: which plans must train as one process does.

All cases train one of a few small models on the same global batches of 8 micro-batches, whatever
the layout. A case is a chain of plans: after the first, each takes over the state of the one before
it, as its reconfigure block says. Plans are made when they are asked for, all by the compiler and
the generator of random plans.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import msgspec
from plan_generator import Limits, generate
from torch_peer import dumped, schedule

from resihp.compiler import SCHEDULES, home_work, initial_plan, lower, ordered
from resihp.compiler.adapt import adapt
from resihp.compiler.cluster import CLUSTERS, Link
from resihp.compiler.lower import everywhere
from resihp.compiler.partition import ranges_of
from resihp.compiler.reconfigure import reconfiguration
from resihp.config import ModelConfig, Numerics
from resihp.ir.model import Batch, Group, LayerRange, Level, Mesh, MicroBatch, Plan, Precision
from resihp.ir.torch_csv import CsvKind, read_torch_csv

NUM_STEPS = 10
GLOBAL_BATCH = 8
"""Micro-batches."""
TOKENS = 32
"""Of a micro-batch."""
UNTIED = ModelConfig(
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=44,
    vocab_size=259,
    initializer_range=0.1,
)
"""A LLaMA; TP 4 copies key and value heads and cuts the vocabulary unevenly."""
TIED = msgspec.structs.replace(UNTIED, model_type="qwen2", tie_word_embeddings=True)
"""A Qwen2.5: biases, and one table for both ends of the model."""
MODELS: dict[str, ModelConfig] = {"untied": UNTIED, "tied": TIED}
_FREE = Link(gb_per_s=1e9, latency_us=1e-6)
_CLUSTER = msgspec.structs.replace(CLUSTERS["cpu-box"], intra_node=_FREE, inter_node=_FREE)
"""Where an exchange costs nothing: else so small a model would never be cut."""
_MEMORY_BYTES = 1 << 30
_SEVERAL = tuple(kind for kind in SCHEDULES if kind in ("interleaved-1f1b", "looped-bfs", "zbv"))


class Phase(NamedTuple):
    """A plan, and how many steps it runs."""

    plan: Plan
    num_steps: int


class Case(NamedTuple):
    """One row of the grid."""

    name: str
    make: Callable[[], list[Phase]]
    model: str = "untied"
    numerics: Numerics = "bitwise"
    precision: Precision = "fp32"
    recompute: bool = False

    @property
    def family(self) -> str:
        """The first word of the name."""
        return self.name.split()[0]


def grid() -> list[Case]:
    """All of it."""
    cases = [*_healthy(), *_unequal(), *_uneven(), *_migrated(), *_adapted(), *_random(range(24))]
    cases += [*_imported(), *_options()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


# --- families


def _healthy() -> Iterator[Case]:
    """Every degree with every schedule that differs there."""
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2)):
        kinds = SCHEDULES if pp > 1 else ("1f1b", "zb-h1", "looped-bfs", "zbv")
        for kind, model in product(kinds, MODELS):
            make = partial(healthy, tp, pp, dp, kind)
            yield Case(f"healthy tp{tp} pp{pp} dp{dp} {kind} {model}", make, model)


def _unequal() -> Iterator[Case]:
    """TP degrees that differ inside a replica and between replicas."""
    pipelines: list[list[list[int]]] = [
        [[4, 2, 1]],
        [[1, 2, 4]],
        [[4, 1, 4, 2]],
        [[1, 4]],
        [[2, 4, 1, 2], [4, 4, 2, 1]],
        [[4, 2], [1, 4]],
        [[2], [1]],
        [[4], [1]],
    ]
    for degrees, kind, model in product(pipelines, ("1f1b", "zb-h1"), MODELS):
        spelled = "+".join("-".join(map(str, pipeline)) for pipeline in degrees)
        yield Case(f"unequal {spelled} {kind} {model}", partial(by_hand, degrees, kind=kind), model)
    for kind in _SEVERAL:
        make = partial(by_hand, [[4, 1], [2, 4]], kind=kind)
        yield Case(f"unequal 4-1+2-4 {kind}", make)
    make = partial(by_hand, [[4, 2], [2, 2]], kind="1f1b", always_cut=True)
    yield Case("unequal 4-2+2-2 all cut", make)


def _uneven() -> Iterator[Case]:
    """Layers split unevenly."""
    for counts, kind in product(((1, 4, 2, 1), (5, 1, 1, 1), (1, 1, 1, 5)), ("1f1b", "zb-h2")):
        spelled = ",".join(map(str, counts))
        make = partial(by_hand, [[1] * 4, [1] * 4], kind=kind, layers=counts)
        yield Case(f"uneven {spelled} {kind}", make)
    for counts, kind in product(((1, 3, 1, 3), (4, 1, 2, 1)), _SEVERAL):
        spelled = ",".join(map(str, counts))
        make = partial(by_hand, [[2, 1]], kind=kind, layers=counts)
        yield Case(f"uneven {spelled} {kind} 2-1", make)


def _migrated() -> Iterator[Case]:
    """Micro-batches that run away from home with all of their stages."""
    for moved, kind in product((1, 2, 3), ("1f1b", "zb-h1", "zbv")):
        make = partial(by_hand, [[1, 1], [1, 1]], kind=kind, num_moved=moved)
        yield Case(f"migrated {moved} {kind}", make)
    for kind in ("1f1b", "interleaved-1f1b"):
        make = partial(by_hand, [[2, 1], [1, 4]], kind=kind, num_moved=2)
        yield Case(f"migrated 2 {kind} unequal", make)


def _adapted() -> Iterator[Case]:
    """What the compiler makes of losses: state moves while the job trains on."""
    losses: list[tuple[tuple[int, int, int], str, list[list[int]]]] = [
        ((1, 2, 2), "1f1b", [[0]]),
        ((1, 4, 2), "zb-h1", [[5]]),
        ((2, 2, 2), "zb-h1", [[1], [6]]),
        ((4, 2, 2), "1f1b", [[2], [9, 13]]),
        ((4, 1, 2), "1f1b", [[3], [6]]),
        ((2, 2, 2), "zbv", [[3]]),
        ((1, 2, 2), "interleaved-1f1b", [[1]]),
        ((2, 4, 2), "zb-auto", [[4], [11]]),
    ]
    for (degrees, kind, lost), model in product(losses, MODELS):
        spelled = "-".join("+".join(map(str, ranks)) for ranks in lost)
        name = "tp{} pp{} dp{}".format(*degrees)
        make = partial(_adapting, degrees, kind, lost)
        yield Case(f"adapted {name} {kind} lost {spelled} {model}", make, model)
    for degrees, kind, lost in (losses[0], losses[2], losses[5]):
        make = partial(_adapting, degrees, kind, lost, resumes=True)
        name = "tp{} pp{} dp{}".format(*degrees)
        yield Case(f"adapted {name} {kind} resumes", make, "tied")
        make = partial(_returning, degrees, kind, lost[0])
        yield Case(f"adapted {name} {kind} returns", make, "tied")


def _random(seeds: Iterable[int]) -> Iterator[Case]:
    """Plans over the whole language: stages anywhere, pairs, single stages that migrate."""
    for seed in seeds:
        yield Case(f"random {seed}", partial(_random_plan, seed))


def _imported() -> Iterator[Case]:
    """torch's own schedules, from the files that it writes."""
    for name, per_rank in (
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 1),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
    ):
        yield Case(f"csv {name} {per_rank} compute", partial(_from_csv, name, per_rank, "compute"))
        if per_rank > 1:
            make = partial(_from_csv, name, per_rank, "comms")
            yield Case(f"csv {name} {per_rank} comms", make, "tied")


def _options() -> Iterator[Case]:
    """The other arithmetic, over some layouts."""
    layouts: dict[str, Callable[[], list[Phase]]] = {
        "tp1 pp2 dp2 zb-h1": partial(healthy, 1, 2, 2, "zb-h1"),
        "tp2 pp2 dp2 interleaved-1f1b": partial(healthy, 2, 2, 2, "interleaved-1f1b"),
        "4-2-1": partial(by_hand, [[4, 2, 1]], kind="zb-h1"),
        "lost 1": partial(_adapting, (2, 2, 2), "1f1b", [[1]]),
    }
    for (name, make), model in product(layouts.items(), MODELS):
        yield Case(f"fast {name} {model}", make, model, numerics="fast")
        yield Case(f"bf16 {name} {model}", make, model, numerics="fast", precision="bf16")
        yield Case(f"recompute {name} {model}", make, model, recompute=True)


# --- plans


def healthy(tp: int, pp: int, dp: int, kind: str) -> list[Phase]:
    """The initial plan of a job."""
    return [Phase(_initial(tp, pp, dp, kind), NUM_STEPS)]


def _initial(tp: int, pp: int, dp: int, kind: str, model: ModelConfig = UNTIED) -> Plan:
    return initial_plan(
        model.shape("parity"),
        Mesh(tp=tp, pp=pp, dp=dp),
        _batch(dp),
        schedule=kind,
        memory_bytes=_MEMORY_BYTES,
    )


def _batch(dp: int) -> Batch:
    return Batch(microbatches=GLOBAL_BATCH // dp, tokens=TOKENS)


def by_hand(
    degrees: Sequence[Sequence[int]],
    *,
    kind: str,
    layers: Sequence[int] | None = None,
    num_moved: int = 0,
    always_cut: bool = False,
    model: ModelConfig = UNTIED,
    largest: int | None = None,
) -> list[Phase]:
    """A pipeline of groups of these TP degrees for each replica.

    `layers` counts those of each stage. The last `num_moved` micro-batches of replica 1 run on 0.
    The mesh has TP degree `largest` (None: that of the largest group).
    """
    tp, pp, dp = largest or max(map(max, degrees)), len(degrees[0]), len(degrees)
    base = _initial(1, pp, 1, kind, model)
    mesh, held = Mesh(tp=tp, pp=pp, dp=dp), [group.layers for group in base.groups]
    if layers is not None:
        new = ranges_of(layers)
        old = sorted(each for ranges in held for each in ranges)
        held = [tuple(new[old.index(each)] for each in ranges) for ranges in held]
    groups = tuple(
        _group(mesh, replica, position, degree, held[position])
        for replica, pipeline in enumerate(degrees)
        for position, degree in enumerate(pipeline)
    )
    used = {rank for group in groups for rank in group.ranks}
    plan = msgspec.structs.replace(
        base,
        mesh=mesh,
        batch=_batch(dp),
        groups=groups,
        streams=(),
        standby=tuple(rank for rank in range(mesh.world) if rank not in used),
        level=Level.SCHEDULE,
    )
    schedule = ordered(plan, kind, _work(dp, num_moved))
    return [Phase(lower(schedule, scatter=everywhere if always_cut else None), NUM_STEPS)]


def _group(mesh: Mesh, replica: int, pp: int, degree: int, layers: tuple[LayerRange, ...]) -> Group:
    first = (replica * mesh.pp + pp) * mesh.tp
    return Group(replica=replica, pp=pp, ranks=tuple(range(first, first + degree)), layers=layers)


def _work(dp: int, num_moved: int) -> Mapping[int, Sequence[MicroBatch]]:
    work = home_work(range(dp), GLOBAL_BATCH // dp)
    if num_moved:
        away = work[1][-num_moved:]
        work = {0: [*work[0], *away], 1: work[1][:-num_moved]}
    return {replica: items for replica, items in work.items() if items}


def _adapting(
    degrees: tuple[int, int, int],
    kind: str,
    losses: Sequence[Sequence[int]],
    *,
    resumes: bool = False,
) -> list[Phase]:
    """Losses one after the other, as evenly over the steps as can be.

    Where a plan `resumes`, it redoes the iteration that its loss interrupted.
    """
    num_plans = len(losses) + 1
    ends = [NUM_STEPS * (turn + 1) // num_plans for turn in range(num_plans)]
    plans = [_initial(*degrees, kind)]
    for lost, start in zip(losses, ends, strict=False):
        step = start if resumes else None
        plans.append(adapt(plans[-1], lost=lost, step=step, cluster=_CLUSTER).plan)
    return _in_turn(plans)


def _returning(degrees: tuple[int, int, int], kind: str, lost: Sequence[int]) -> list[Phase]:
    """Ranks are lost, and come back without state."""
    whole = _initial(*degrees, kind)
    left = adapt(whole, lost=lost, cluster=_CLUSTER).plan
    back = msgspec.structs.replace(
        whole, returned=tuple(lost), reconfigure=reconfiguration(left, whole.groups, ())
    )
    return _in_turn([whole, left, back])


def _in_turn(plans: Sequence[Plan]) -> list[Phase]:
    """All steps, dealt out as evenly as can be."""
    ends = [NUM_STEPS * turn // len(plans) for turn in range(len(plans) + 1)]
    return [
        Phase(plan, end - start) for plan, (start, end) in zip(plans, pairwise(ends), strict=True)
    ]


def _random_plan(seed: int) -> list[Phase]:
    """A plan for a global batch of 8 and at most 8 layers; the rest is as it is drawn."""
    rng = random.Random(seed)
    while True:
        plan = generate(rng, Limits(num_ranks=12, dp=2, stages=6, microbatches=8))
        fits = plan.mesh.dp * plan.batch.microbatches == GLOBAL_BATCH and plan.model.layers == 8
        if fits and plan.mesh.dp <= 2:
            model = UNTIED.shape("parity")
            batch = msgspec.structs.replace(plan.batch, tokens=TOKENS)
            return [Phase(msgspec.structs.replace(plan, model=model, batch=batch), NUM_STEPS)]


def _from_csv(name: str, per_rank: int, kind: CsvKind) -> list[Phase]:
    """A schedule of torch over four ranks; it says who computes what, or who sends what too."""
    with tempfile.TemporaryDirectory() as folder:
        text = dumped(schedule(name, 4, per_rank, GLOBAL_BATCH), kind, Path(folder))
    plan = read_torch_csv(text, model=UNTIED.shape("parity"), tokens=TOKENS).plan
    return [Phase(lower(plan) if kind == "compute" else plan, NUM_STEPS)]
