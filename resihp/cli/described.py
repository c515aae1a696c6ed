"""What the command line says of model, cluster, health and lengths, for every verb that prices.

A verb declares what it takes with the `add_*` functions and reads it with the others. Nothing
heavy is imported before something is read.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.compiler.cluster import Cluster, Health
    from resihp.compiler.costs import CostModel, Lengths, Precision
    from resihp.compiler.incidents import Incidents
    from resihp.compiler.models import Model
    from resihp.compiler.pricing import Pricing
    from resihp.ir.model import Plan

__all__ = [
    "MAX_LENGTHS_BYTES",
    "add_cluster",
    "add_health",
    "add_lengths",
    "add_model",
    "add_profile",
    "cluster_of",
    "health_of",
    "incidents_of",
    "lengths_of",
    "measured",
    "model_of",
    "positive",
    "precision_of",
    "pricing_of",
    "size_of",
]

MAX_LENGTHS_BYTES = 1 << 27


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare `--model`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|CONFIG.JSON",
        help="a model by name, such as llama2-13b or qwen2.5-7b, or its Hugging Face config",
    )


def add_cluster(parser: argparse.ArgumentParser, precision: Precision | None = None) -> None:
    """Declare `--cluster` and `--precision`, whose default is `precision` or what a plan says."""
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE.TOML",
        help="a preset or a description (default: the smallest preset that can hold the job)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default=precision,
        help="of parameters and activations (default: "
        f"{precision or 'what the plan says, or fp32'})",
    )


def add_health(parser: argparse.ArgumentParser) -> None:
    """Declare `--fail`, `--slow`, `--link` and `--health`."""
    group = parser.add_argument_group("what has failed (each may be given several times)")
    group.add_argument(
        "--fail", action="append", default=[], metavar="rank=5,6|node=2", help="lost ranks"
    )
    group.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="rank=12:0.5",
        help="ranks that compute at a share of the healthy speed",
    )
    group.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="3-4:x2|3-4:+30ms",
        help="two nodes between which transfers take longer",
    )
    group.add_argument(
        "--health",
        metavar="FILE",
        help='the same in TOML or JSON: fail = ["rank=5"], slow = [...], link = [...]; what the '
        "command line says counts over it",
    )


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Declare `--lengths`."""
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        help="lengths of the documents of each micro-batch: one JSON list a line, replica by "
        "replica; fewer lines repeat (default: one document per micro-batch)",
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Declare `--profile`."""
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="measured times of F, B and W, a JSON object a line; costs are fitted to them, and "
        "what was not measured follows (default: costs from FLOPs)",
    )


def measured(args: argparse.Namespace, costs: CostModel) -> CostModel:
    """`costs`, or those that fit the file of `--profile`; how well is told on stderr.

    Raises UserError.
    """
    if getattr(args, "profile", None) is None:
        return costs
    from resihp.compiler.measured import MAX_PROFILE_BYTES, measured_costs, samples_in

    samples = samples_in(_read(args.profile, MAX_PROFILE_BYTES), args.profile)
    found = measured_costs(samples, costs)
    for each in found.fits:
        how = "scaled" if each.is_scaled else "fitted"
        print(
            f"profile: {each.part} TP {each.tp} {each.op} {how} to {each.num_samples} "
            f"sample{'' if each.num_samples == 1 else 's'}: {each.per_token_s:.3g} s a token, "
            f"{each.per_pair_s:.3g} s a pair; off by {each.mean_relative_error:.1%} in the mean, "
            f"rms {each.rms_error_s:.3g} s, R^2 {each.explained:.3f}",
            file=sys.stderr,
        )
    return found


def model_of(name: str) -> Model:
    """A model by name, or that of a `config.json`. Raises UserError."""
    from resihp.compiler.models import find_model

    if not _is_path(name, ".json"):
        return find_model(name)
    from resihp.compiler.hf_config import MAX_CONFIG_BYTES, model_of_config

    path = Path(name)
    called = path.absolute().parent.name if path.stem == "config" else path.stem
    words = re.findall(r"[A-Za-z0-9][A-Za-z0-9._+-]*", called)
    return model_of_config(
        _read(name, MAX_CONFIG_BYTES), name="-".join(words) or "model", path=name
    )


def cluster_of(name: str, num_ranks: int) -> Cluster:
    """A preset or a TOML description. Raises UserError if it has not `num_ranks` devices."""
    from resihp.compiler.cluster import Cluster, find_cluster

    if _is_path(name, ".toml"):
        from resihp.config.toml import read_file

        cluster = read_file(name, Cluster, lambda _: ())
    else:
        cluster = find_cluster(name)
    if cluster.num_devices < num_ranks:
        per_node = cluster.cluster.gpus_per_node
        raise UserError(
            f"cluster {name} has {cluster.cluster.nodes} nodes of {per_node} devices and the mesh "
            f"{num_ranks} ranks; nearest valid: {-(-num_ranks // per_node)} nodes"
        )
    return cluster


def incidents_of(args: argparse.Namespace) -> Incidents:
    """What the file of `--health` and then the command line say. Raises UserError."""
    from resihp.compiler.incidents import MAX_FILE_BYTES, Incident, Incidents, incidents_in

    said = Incidents(
        *(
            [Incident(f"--{kind}", text) for text in getattr(args, kind)]
            for kind in Incidents._fields
        )
    )
    if args.health is None:
        return said
    filed = incidents_in(_read(args.health, MAX_FILE_BYTES), args.health)
    return Incidents(*([*before, *after] for before, after in zip(filed, said, strict=True)))


def health_of(args: argparse.Namespace, cluster: Cluster, num_ranks: int) -> Health:
    """The state of health of a job of `num_ranks` ranks. Raises UserError."""
    from resihp.compiler.incidents import health_of as read

    return read(incidents_of(args), cluster, num_ranks)


def lengths_of(args: argparse.Namespace, plan: Plan) -> tuple[Lengths, ...] | None:
    """Of micro-batch `number` of replica `home` at `home * microbatches + number`.

    None where the command line says nothing. Raises UserError.
    """
    from resihp.compiler.costs import Lengths

    if args.lengths is None:
        return None
    total = plan.mesh.dp * plan.batch.microbatches
    lines = [line for line in _read(args.lengths, MAX_LENGTHS_BYTES).splitlines() if line.strip()]
    if not 1 <= len(lines) <= total:
        raise UserError(
            f"{args.lengths} has {len(lines)} lines and the plan {total} micro-batches; wanted are "
            f"1 to {total} lines, and fewer repeat"
        )
    read = [
        Lengths.of(_documents(line, f"{args.lengths}:{number}", plan.batch.tokens))
        for number, line in enumerate(lines, start=1)
    ]
    return tuple(read[index % len(read)] for index in range(total))


def precision_of(args: argparse.Namespace, plan: Plan) -> Precision:
    """What `--precision` says, or else the plan."""
    return args.precision or plan.precision


def pricing_of(plan: Plan, args: argparse.Namespace) -> Pricing:
    """Prices of `plan` on the cluster and in the health that the command line describes.

    `args` has what `add_cluster` and, if at all, `add_health` declare. Raises UserError.
    """
    from resihp.compiler.cluster import Health
    from resihp.compiler.defaults import default_cluster, pricing_of_plan
    from resihp.compiler.pricing import Pricing

    ranks = plan.mesh.world
    cluster = default_cluster(plan) if args.cluster is None else cluster_of(args.cluster, ranks)
    health = health_of(args, cluster, ranks) if hasattr(args, "fail") else Health()
    found = pricing_of_plan(plan, health, cluster, precision_of(args, plan))
    return Pricing(found.shape, measured(args, found.costs), cluster, health)


def positive(option: str, value: int) -> int:
    """`value` of `option`. Raises UserError unless it is 1 or more."""
    if value < 1:
        raise UserError(f"{option} {value}: must be at least 1; nearest valid: 1")
    return value


def size_of(option: str, text: str) -> int:
    """Bytes of a size such as 40GiB. Raises UserError."""
    from resihp.config.sizes import parse_size

    try:
        return positive(option, parse_size(text))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def _documents(line: bytes, where: str, most_tokens: int) -> list[int]:
    import msgspec

    try:
        documents = msgspec.json.decode(line, type=list[int])
    except msgspec.DecodeError as error:
        raise UserError(f"{where}: no JSON list of document lengths: {error}") from None
    if not documents or min(documents) < 1:
        raise UserError(f"{where}: a micro-batch has documents of 1 token or more")
    if sum(documents) > most_tokens:
        raise UserError(
            f"{where}: {sum(documents)} tokens and the micro-batches of the plan have "
            f"{most_tokens}; nearest valid: {most_tokens} tokens in all"
        )
    return documents


def _is_path(name: str, ending: str) -> bool:
    return name.lower().endswith(ending) or "/" in name


def _read(path: str, most_bytes: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read {path}: {reason}") from None
    if len(data) > most_bytes:
        raise UserError(f"{path} is longer than {most_bytes} bytes")
    return data
