"""What must hold between values of a job file, each with the nearest valid choice.

A check is a pure function from the decoded config to problems; the reader reports the first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator

from resihp.config.injection import injection_problems
from resihp.config.schema import MAX_WORLD, JobConfig
from resihp.config.sizes import parse_size
from resihp.config.toml import Problem

__all__ = ["nearest", "problems"]

MIN_MEMORY_BYTES = 1 << 20
_ONLY_STAGES = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-auto": 1, "zbv": 2}
"""How many a rank runs under schedules that leave no choice."""


def problems(config: JobConfig) -> Iterator[Problem]:
    """All problems, the most basic first."""
    for check in _CHECKS:
        yield from check(config)


def nearest(value: int, choices: Iterable[int]) -> int | None:
    """The choice closest to `value`, the smaller of two that are as close."""
    return min(choices, key=lambda choice: (abs(choice - value), choice), default=None)


def _cluster(config: JobConfig) -> Iterator[Problem]:
    if config.device.cluster is not None and config.device.kind != "emulated":
        yield Problem(
            "device.cluster",
            f'is said of kind = "emulated" only, and this one is "{config.device.kind}"; '
            "leave it out",
        )


def _heads(config: JobConfig) -> Iterator[Problem]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % kv_heads:
        best = nearest(kv_heads, _divisors(heads))
        yield Problem(
            "model.num_key_value_heads",
            f"must divide num_attention_heads ({heads}); nearest valid: {best}",
        )
    unit = 2 * heads
    if model.hidden_size % unit:
        best = _nearest_multiple(model.hidden_size, unit)
        yield Problem(
            "model.hidden_size",
            f"must be a multiple of {unit}, an even size for each of num_attention_heads "
            f"({heads}); nearest valid: {best}",
        )


def _biases(config: JobConfig) -> Iterator[Problem]:
    if config.model.attention_bias and config.model.model_type != "llama":
        yield Problem(
            "model.attention_bias",
            f'is said of model_type = "llama" only; "{config.model.model_type}" always has biases '
            "of queries, keys and values; nearest valid: false",
        )


def _rope_scaling(config: JobConfig) -> Iterator[Problem]:
    scaling, here = config.model.rope_scaling, "model.rope_scaling"
    if scaling is None:
        return
    kind = scaling.rope_type
    if kind in ("llama3", "yarn") and scaling.original_max_position_embeddings is None:
        yield Problem(
            here,
            f'needs original_max_position_embeddings with rope_type = "{kind}", the tokens of the '
            "context that the model was first trained with, as its config.json says",
        )
    bounds = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_slow", "beta_fast"),
    }
    if kind in bounds:
        low_key, high_key = bounds[kind]
        low, high = getattr(scaling, low_key), getattr(scaling, high_key)
        if low >= high:
            yield Problem(
                f"{here}.{low_key}",
                f"must be below {high_key} ({high}); nearest valid: {high / 2}",
            )


def _tensor_parallel(config: JobConfig) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tp
    heads, kv_heads, ffn = (
        model.num_attention_heads,
        model.num_key_value_heads,
        model.intermediate_size,
    )

    def divides(degree: int) -> bool:
        """Where there are more members than KV heads, each head is copied to as many."""
        copies = not kv_heads % degree or not degree % kv_heads
        return not heads % degree and not ffn % degree and copies

    if _is_power_of_two(tp) and divides(tp):
        return
    powers = (1 << exponent for exponent in range(MAX_WORLD.bit_length()))
    best = nearest(tp, filter(divides, powers))
    yield Problem(
        "parallel.tp",
        f"must be a power of two that divides num_attention_heads ({heads}) and "
        f"intermediate_size ({ffn}), and divides num_key_value_heads ({kv_heads}) or is a multiple "
        f"of it; nearest valid: {best}",
    )


def _pipeline(config: JobConfig) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.num_hidden_layers
    if parallel.pp > layers:
        yield Problem(
            "parallel.pp",
            f"must be at most num_hidden_layers ({layers}), a layer for each stage; "
            f"nearest valid: {layers}",
        )
    yield from _stages(config)


def _stages(config: JobConfig) -> Iterator[Problem]:
    """Stages of a rank that the schedule has, and a layer for each."""
    parallel, layers = config.parallel, config.model.num_hidden_layers
    said, only = parallel.stages_per_rank, _ONLY_STAGES.get(parallel.schedule)
    if None not in (said, only) and said != only:
        yield Problem(
            "parallel.stages_per_rank",
            f'must be {only} with schedule = "{parallel.schedule}"; nearest valid: {only}',
        )
    elif parallel.num_stages > layers:
        key = "schedule" if said is None else "stages_per_rank"
        yield Problem(
            f"parallel.{key}",
            f"makes {parallel.num_stages} stages of parallel.pp ({parallel.pp}), and "
            f"num_hidden_layers ({layers}) is less than a layer for each; "
            f"nearest valid: {_fewer_stages(only, layers, parallel.pp)}",
        )


def _fewer_stages(only: int | None, layers: int, pp: int) -> str:
    if only is None:
        return f"stages_per_rank = {max(1, layers // pp)}"
    return f"pp = {max(1, layers // only)}"


def _world(config: JobConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.world <= MAX_WORLD:
        return
    per_replica = parallel.tp * parallel.pp
    key, fits = ("dp", MAX_WORLD // per_replica) if per_replica <= MAX_WORLD else ("pp", 0)
    best = fits or MAX_WORLD // parallel.tp
    yield Problem(
        f"parallel.{key}",
        f"makes {parallel.world} ranks (tp * pp * dp), at most {MAX_WORLD} fit one machine; "
        f"nearest valid: {best}",
    )


def _tokens(config: JobConfig) -> Iterator[Problem]:
    tokens, tp = config.batch.tokens, config.parallel.tp
    if tokens % tp:
        best = _nearest_multiple(tokens, tp)
        yield Problem(
            "batch.tokens",
            f"must be a multiple of parallel.tp ({tp}), which cuts activations into as many "
            f"chunks; nearest valid: {best}",
        )


def _numerics(config: JobConfig) -> Iterator[Problem]:
    compute = config.compute
    if compute.precision == "bf16" and compute.numerics == "bitwise":
        yield Problem(
            "compute.numerics",
            'must be "fast" with precision = "bf16": plans count on one sum of gradients there; '
            'nearest valid: "fast"',
        )


def _memory(config: JobConfig) -> Iterator[Problem]:
    try:
        num_bytes = parse_size(config.device.memory)
    except ValueError as error:
        yield Problem("device.memory", str(error))
        return
    if num_bytes < MIN_MEMORY_BYTES:
        yield Problem("device.memory", "must be at least 1MiB; nearest valid: 1MiB")


def _warmup(config: JobConfig) -> Iterator[Problem]:
    steps = config.job.steps
    if config.optimizer.warmup_steps > steps:
        yield Problem(
            "optimizer.warmup_steps",
            f"must be at most job.steps ({steps}); nearest valid: {steps}",
        )


def _network(config: JobConfig) -> Iterator[Problem]:
    network, world = config.network, config.parallel.world
    if not network.nodes:
        for key in ("port", "secret_file"):
            if getattr(network, key) is not None:
                yield Problem(f"network.{key}", "is said with network.nodes only; leave it out")
        return
    if network.port is None:
        yield Problem(
            "network.nodes",
            "needs network.port, where the monitor of each node listens; nearest valid: 29700",
        )
    if network.secret_file is None:
        yield Problem(
            "network.nodes",
            "is refused without network.secret_file, a file of mode 0600 that holds the job's "
            "secret on each node; nearest valid: name one, or leave [network] out, and everything "
            "stays on this machine's loopback interface",
        )
    for node in network.nodes:
        if _is_wildcard(node):
            yield Problem(
                "network.nodes",
                f'"{node}" stands for every interface; name the address of one, such as '
                '"127.0.0.1"',
            )
    num = len(network.nodes)
    if len(set(network.nodes)) < num:
        yield Problem("network.nodes", "names one address twice; each node has its own")
    if world % num:
        best = nearest(num, _divisors(world))
        yield Problem(
            "network.nodes",
            f"must be as many as divide the number of ranks, tp * pp * dp = {world}; "
            f"nearest valid: {best} nodes",
        )


def _injections(config: JobConfig) -> Iterator[Problem]:
    yield from injection_problems(
        config.inject,
        world=config.parallel.world,
        steps=config.job.steps,
        restarts=config.rejoin.restarts,
        device=config.device.kind,
    )


_CHECKS: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _heads,
    _biases,
    _rope_scaling,
    _tensor_parallel,
    _pipeline,
    _world,
    _tokens,
    _numerics,
    _memory,
    _cluster,
    _warmup,
    _network,
    _injections,
)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def _divisors(value: int) -> Iterator[int]:
    return (d for d in range(1, value + 1) if value % d == 0)


def _nearest_multiple(value: int, unit: int) -> int:
    below = value // unit * unit
    best = nearest(value, (m for m in (below, below + unit) if m))
    assert best is not None
    return best
