"""`resihp search`: which degrees, micro-batches and schedule train a model fastest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli import described
from resihp.cli.documents import tell_documents
from resihp.cli.plan_files import is_json, write_text
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.compiler.cluster import Cluster
    from resihp.compiler.costs import CostModel
    from resihp.compiler.degrees import Job, Result
    from resihp.compiler.models import Model
    from resihp.ir.model import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    described.add_model(parser)
    parser.add_argument(
        "--global-batch", type=int, required=True, metavar="N", help="sequences of a step"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="of a sequence (default: 4096)"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="devices to use at most (default: all of the cluster)"
    )
    parser.add_argument(
        "--min-dp",
        type=int,
        default=2,
        metavar="N",
        help="fewest replicas (default: 2, so that the state of a lost rank is somewhere else)",
    )
    described.add_cluster(parser, precision="bf16")
    described.add_profile(parser)
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a device (default: what the cluster's devices have)"
    )
    parser.add_argument(
        "--schedules", metavar="NAME,NAME", help="to choose from (default: all that there are)"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="choices to list (10)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the list")
    parser.add_argument(
        "-o", "--output", metavar="PLAN", help="write the best plan to this file; JSON if so named"
    )
    parser.epilog = (
        "A micro-batch is one sequence or more, each a document. TP stays inside a node. "
        "Exit status: 0 done, 2 wrong use, 4 nothing fits."
    )


def run(args: argparse.Namespace) -> int:
    """List the best choices; write the plan of the first."""
    from resihp.compiler.cluster import Health
    from resihp.compiler.costs import CostModel
    from resihp.compiler.degrees import search
    from resihp.compiler.pricing import Pricing

    model = described.model_of(args.model)
    cluster = _cluster(model, args)
    job = _job(cluster, args)
    per_node = cluster.cluster.gpus_per_node
    costs = CostModel.of_description(model, cluster, precision=job.precision, max_tp=per_node)
    costs = described.measured(args, costs)
    top = described.positive("--top", args.top)
    result, plan = search(job, model, Pricing(model.shape, costs, cluster, Health()))
    sys.stdout.write(_json(result, costs, top) if args.format == "json" else _table(result, top))
    if args.format == "text":
        print(_summary(result, job, cluster), file=sys.stderr)
    if args.output is not None:
        _write(plan, args.output)
    tell_documents(result.choices[0].sequences, plan.batch.tokens, args.output)
    return 0


def _cluster(model: Model, args: argparse.Namespace) -> Cluster:
    from resihp.compiler.defaults import smallest_cluster
    from resihp.ir.model import Mesh

    if args.gpus is not None:
        described.positive("--gpus", args.gpus)
    if args.cluster is not None:
        return described.cluster_of(args.cluster, args.gpus or 1)
    if args.gpus is None:
        raise UserError("name a --cluster, or say with --gpus how many devices there are")
    memory = None if args.memory is None else described.size_of("--memory", args.memory)
    return smallest_cluster(model, Mesh(tp=args.gpus, pp=1, dp=1), memory)


def _job(cluster: Cluster, args: argparse.Namespace) -> Job:
    from resihp.compiler.degrees import Job
    from resihp.compiler.schedules import SCHEDULES

    memory = None if args.memory is None else described.size_of("--memory", args.memory)
    return Job(
        num_devices=args.gpus or cluster.num_devices,
        global_batch=described.positive("--global-batch", args.global_batch),
        sequence_tokens=described.positive("--tokens", args.tokens),
        fewest_replicas=described.positive("--min-dp", args.min_dp),
        precision=args.precision,
        memory_bytes=memory or cluster.device.memory_bytes,
        schedules=SCHEDULES if args.schedules is None else tuple(args.schedules.split(",")),
    )


_HEAD = (
    "  tp   pp   dp  schedule          micro-batches   iteration   tokens/s   FLOPs  bubble  GiB"
)


def _table(result: Result, top: int) -> str:
    from resihp.compiler.words import spell_rate

    lines = [_HEAD]
    for choice in result.choices[:top]:
        found = choice.prediction
        split = f"{choice.microbatches} x {choice.sequences}"
        lines.append(
            f"{choice.tp:4} {choice.pp:4} {choice.dp:4}  {choice.schedule:16}  {split:>13}  "
            f"{found.iteration_s:8.3f} s  {spell_rate(found.tokens_per_s):>9}  "
            f"{found.flops_share:6.1%}  {found.bubble_share:6.1%}  "
            f"{found.peak_bytes / (1 << 30):.0f}"
        )
    return "\n".join(lines) + "\n"


def _summary(result: Result, job: Job, cluster: Cluster) -> str:
    devices = f"{job.num_devices} device{'' if job.num_devices == 1 else 's'}"
    note = "" if result.is_complete else "; others may be faster: name fewer --schedules"
    return (
        f"{cluster.cluster.name}, {devices}, {job.precision}: "
        f"{result.num_candidates} ways to cut the job, {result.num_drafts} schedules simulated "
        f"({result.num_too_large} did not fit), then {len(result.choices)} plans{note}"
    )


def _json(result: Result, costs: CostModel, top: int) -> str:
    import msgspec

    shown = msgspec.to_builtins(msgspec.structs.replace(result, choices=result.choices[:top]))
    shown["fits"] = costs.fits
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n"


def _write(plan: Plan, path: str) -> None:
    from resihp.ir.plan_json import print_json
    from resihp.ir.printer import print_plan

    write_text(path, print_json(plan) if is_json(path) else print_plan(plan))
