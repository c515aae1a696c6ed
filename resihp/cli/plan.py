"""`resihp plan`: the plan of a healthy job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli import described
from resihp.cli.documents import tell_documents
from resihp.cli.plan_files import add_output, write_plan
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.compiler.healthy import Recipe, Split
    from resihp.compiler.models import Model
    from resihp.compiler.pricing import Pricing
    from resihp.ir.model import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    described.add_model(parser)
    for name, what in (
        ("tp", "ranks of a tensor-parallel group"),
        ("pp", "positions in the pipeline"),
        ("dp", "replicas"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="N", help="per replica and step"
    )
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="per micro-batch")
    parser.add_argument(
        "--schedule", default="1f1b", metavar="NAME", help="order of the work (default: 1f1b)"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="N", help="stages per position (default: the schedule's)"
    )
    parser.add_argument(
        "--layers",
        default="auto",
        metavar="auto|balanced|even|10,10,10,10",
        help="of each stage: the fastest split by simulation (auto, default), the one whose "
        "slowest stage is as fast as can be, an even one, or as given",
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=1,
        metavar="N",
        help="of equal length in a micro-batch (default: 1)",
    )
    described.add_cluster(parser)
    described.add_profile(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="of a device, such as 40GiB (default: what the cluster's devices have)",
    )
    parser.add_argument(
        "--transport", metavar="NAME", help="that the plan has to end under (default: edge)"
    )
    add_output(parser)
    parser.epilog = (
        "The plan is verified; what is predicted of it is told on stderr. "
        "Exit status: 0 done, 1 findings, 2 wrong use, 4 the model does not fit."
    )


def run(args: argparse.Namespace) -> int:
    """Make the plan, verify it, write it and tell what is predicted."""
    from resihp.compiler.healthy import healthy_plan

    model = described.model_of(args.model)
    recipe, pricing = _asked(model, args)
    plan = healthy_plan(recipe, pricing)
    if _has_errors(plan):
        return 1
    write_plan(plan, args)
    print(_summary(plan, recipe, model, pricing), file=sys.stderr)
    tell_documents(recipe.documents, plan.batch.tokens, args.output)
    return 0


def _asked(model: Model, args: argparse.Namespace) -> tuple[Recipe, Pricing]:
    """What the command line asks for, and the prices of the cluster."""
    from resihp.compiler.cluster import Health
    from resihp.compiler.costs import CostModel
    from resihp.compiler.defaults import smallest_cluster
    from resihp.compiler.healthy import Recipe, check_degrees
    from resihp.compiler.pricing import Pricing
    from resihp.ir.model import Batch, Mesh

    mesh = Mesh(
        tp=described.positive("--tp", args.tp),
        pp=described.positive("--pp", args.pp),
        dp=described.positive("--dp", args.dp),
    )
    memory = None if args.memory is None else described.size_of("--memory", args.memory)
    if args.cluster is None:
        cluster = smallest_cluster(model, mesh, memory)
    else:
        cluster = described.cluster_of(args.cluster, 1)
    check_degrees(model.shape, mesh, cluster)
    precision = args.precision or "fp32"
    costs = CostModel.of_description(model, cluster, precision=precision, max_tp=mesh.tp)
    recipe = Recipe(
        mesh=mesh,
        batch=Batch(
            microbatches=described.positive("--microbatches", args.microbatches),
            tokens=described.positive("--tokens", args.tokens),
        ),
        schedule=args.schedule,
        num_chunks=args.chunks,
        layers=_layers(args.layers),
        precision=precision,
        memory_bytes=memory or cluster.device.memory_bytes,
        transport=args.transport,
        documents=_documents(args),
    )
    return recipe, Pricing(model.shape, described.measured(args, costs), cluster, Health())


def _documents(args: argparse.Namespace) -> int:
    number = described.positive("--documents", args.documents)
    if number > args.tokens:
        raise UserError(
            f"--documents {number}: a micro-batch has {args.tokens} tokens; nearest valid: "
            f"{args.tokens}"
        )
    return number


def _layers(text: str) -> tuple[int, ...] | Split:
    if text == "auto" or text == "balanced" or text == "even":
        return text
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise UserError(f"--layers {text}: wanted is auto, balanced, even or a list such as 10,10")
    return tuple(map(int, words))


def _has_errors(plan: Plan) -> bool:
    """Whether the verifier finds errors; whatever it finds is printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.parser import parse
    from resihp.ir.printer import print_plan
    from resihp.ir.render import render_text
    from resihp.ir.verify import has_errors, verify

    parsed = parse(print_plan(plan))
    findings = verify(parsed, facts=facts_of)
    if findings:
        print(render_text(findings, parsed.text, "<plan>"), file=sys.stderr)
    return has_errors(findings)


def _summary(plan: Plan, recipe: Recipe, model: Model, pricing: Pricing) -> str:
    """Two lines: what the plan is, and what is predicted; a third where TP leaves a node."""
    from resihp.compiler.prediction import predict
    from resihp.compiler.words import spell_rate, spell_seconds
    from resihp.ir.verify.memory import readable_bytes

    mesh, cluster = plan.mesh, pricing.cluster.cluster
    layers = sorted(each for group in plan.groups[: mesh.pp] for each in group.layers)
    counts = ",".join(str(each.last - each.first + 1) for each in layers)
    found = predict(plan, model, pricing, recipe.lengths)
    note = ""
    if mesh.tp > cluster.gpus_per_node:
        note = f"\nTP {mesh.tp} is more than the {cluster.gpus_per_node} devices of a node: "
        note += "its all-reduces are priced on the links between nodes"
    capacity = "" if plan.memory_bytes is None else f" of {readable_bytes(plan.memory_bytes)}"
    return (
        f"{plan.model.name} in {plan.precision} on {cluster.name} ({mesh.world} of "
        f"{cluster.nodes * cluster.gpus_per_node} devices): {plan.schedule}, layers {counts}\n"
        f"iteration {spell_seconds(found.iteration_s)}, {spell_rate(found.tokens_per_s)} tokens/s, "
        f"{found.flops_share:.0%} of the peak FLOPs, bubble {found.bubble_share:.1%}, memory "
        f"{readable_bytes(found.peak_bytes)}{capacity} ({found.fullest}){note}"
    )
