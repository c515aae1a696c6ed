"""`resihp adapt`: the best plan for what is left of a job, and why it is that one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli import described
from resihp.cli.plan_files import (
    is_json,
    name_of_file,
    parse_text,
    read_text,
    report,
    write_text,
)
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.compiler.adaptation import Situation
    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="the plan that ran before, or - for stdin")
    described.add_cluster(parser)
    described.add_health(parser)
    described.add_lengths(parser)
    described.add_profile(parser)
    parser.add_argument(
        "--rejoin",
        action="append",
        default=[],
        metavar="rank=5,6|node=2",
        help="ranks that the plan has lost and that are back, without state (repeatable)",
    )
    parser.add_argument(
        "--resume",
        type=int,
        metavar="STEP",
        help="the interrupted iteration that the plan redoes (default: it begins a new one)",
    )
    parser.add_argument(
        "--whole-microbatches",
        action="store_true",
        help="each micro-batch runs all its stages in one replica",
    )
    parser.add_argument("--keep-layers", action="store_true", help="layers stay in their stages")
    parser.add_argument(
        "--min-holders",
        type=int,
        default=2,
        metavar="N",
        help="groups that are to hold each layer where that can be, so that a loss is no end of "
        "the job; 1 looks at time alone (default: 2)",
    )
    parser.add_argument(
        "--least-gain",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="change nothing that can stay unless an iteration gets shorter by this share, such "
        "as 0.02 (default: 0)",
    )
    parser.add_argument(
        "--budget",
        type=int,
        metavar="CHUNKS",
        help="chunks of work that the planner may play (default: 20000); the same number always "
        "gives the same plan",
    )
    parser.add_argument(
        "--policy",
        default="resihp",
        metavar="NAME",
        help="who decides: resihp (default), resihp-literal, none, recycle, oobleck, greyhound, "
        "adaptra, recycle+greyhound or oobleck+greyhound",
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument(
        "--format",
        choices=("plan", "text", "json"),
        default="plan",
        help="on stdout: the plan, with the decision on stderr (default); the decision alone; or "
        "the decision with the plan's text in it as JSON",
    )
    parser.epilog = (
        "Both plans are verified, the new one against the old one. "
        "Exit status: 0 done, 1 findings, or an answer that is no plan, 2 wrong use, 4 no plan can "
        "carry the loss."
    )


def run(args: argparse.Namespace) -> int:
    """Verify the plan, adapt it, and tell what was decided."""
    from resihp.compiler.adaptation import DEFAULT_BUDGET, adapt

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    if _has_errors(parsed, args.file):
        return 1
    if not 0.0 <= args.least_gain < 1.0:
        raise UserError(f"--least-gain {args.least_gain}: must be from 0 to below 1")
    budget = DEFAULT_BUDGET if args.budget is None else args.budget
    if budget < 0:
        raise UserError(f"--budget {budget}: must be at least 0; nearest valid: 0")
    situation = _situation(parsed.plan, args)
    if args.policy != "resihp":
        return _run_policy(situation, args)
    decision = adapt(situation, budget=budget, least_gain=args.least_gain)
    record = decision.record()
    record["warnings"] = warnings = _warnings(situation, decision.plan)
    record["fits"] = situation.pricing.costs.fits
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _tell(decision.plan, decision.text, record, decision.summary(), args)
    return 0


def _warnings(situation: Situation, plan: Plan) -> tuple[str, ...]:
    """Why the plan may not run on the cluster."""
    from resihp.compiler.device_memory import memory_warnings
    from resihp.compiler.simulate import simulate

    pricing = situation.pricing
    if plan.memory_bytes is not None and plan.memory_bytes <= pricing.cluster.device.memory_bytes:
        return ()
    return memory_warnings(simulate(plan, pricing))


def _run_policy(situation: Situation, args: argparse.Namespace) -> int:
    """Ask another policy. Raises UserError for an unknown one, NoFeasiblePlan where it stops."""
    from resihp.compiler.adaptation.emit import check
    from resihp.compiler.policies import POLICIES, find_policies
    from resihp.compiler.words import spell_seconds
    from resihp.errors import NoFeasiblePlan

    chosen = find_policies(args.policy)
    if args.lengths is not None:
        raise UserError(f"--lengths says nothing to --policy {args.policy}: leave one out")
    if len(chosen) != 1:
        raise UserError(f"--policy {args.policy}: wanted is one; `simulate --compare` has all")
    outcome = POLICIES[chosen[0]](situation)
    if outcome.iteration_s is None:
        raise NoFeasiblePlan(f"{outcome.name}: {outcome.note}")
    summary = f"{outcome.name}: {spell_seconds(outcome.iteration_s)} an iteration; {outcome.note}"
    if outcome.plan is None:
        print(f"{summary}; the plan language cannot say this", file=sys.stderr)
        return 1
    text = check(situation, outcome.plan).text
    record: dict[str, object] = {
        "policy": outcome.name,
        "iteration_s": outcome.iteration_s,
        "note": outcome.note,
        "text": text,
    }
    _tell(outcome.plan, text, record, summary, args)
    return 0


def _situation(plan: Plan, args: argparse.Namespace) -> Situation:
    """The plan before and all that the command line says. Raises UserError."""
    from msgspec import structs

    from resihp.compiler.adaptation import Profile, Situation
    from resihp.compiler.incidents import Incident, Incidents, health_of
    from resihp.ir.model import Level

    if plan.level is not Level.PLAN:
        raise UserError(f"{name_of_file(args.file)} is a {plan.level}; `resihp lower` it first")
    if args.min_holders < 1:
        raise UserError(f"--min-holders {args.min_holders}: must be at least 1; nearest valid: 1")
    if args.resume is not None and args.resume < 0:
        raise UserError(f"--resume {args.resume}: must be at least 0; nearest valid: 0")
    plan = structs.replace(plan, precision=described.precision_of(args, plan))
    pricing = described.pricing_of(plan, args)
    rejoined = Incidents(fail=[Incident("--rejoin", text) for text in args.rejoin])
    return Situation(
        plan,
        pricing,
        Profile(moves_single_stages=not args.whole_microbatches, repartitions=not args.keep_layers),
        args.resume,
        health_of(rejoined, pricing.cluster, plan.mesh.world).lost,
        described.lengths_of(args, plan),
        args.min_holders,
    )


def _tell(
    plan: Plan, text: str, record: dict[str, object], summary: str, args: argparse.Namespace
) -> None:
    """Write the plan and the decision where they were asked for."""
    import msgspec

    from resihp.ir.plan_json import print_json

    if args.output is not None:
        write_text(args.output, print_json(plan) if is_json(args.output) else text)
    match args.format:
        case "json":
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")
        case "text":
            sys.stdout.write(summary + "\n")
        case _:
            print(summary, file=sys.stderr)
            if args.output is None:
                sys.stdout.write(text)


def _has_errors(parsed: Parsed, path: str) -> bool:
    """Whether the verifier finds errors; whatever it finds is printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.render import render_text
    from resihp.ir.verify import has_errors, verify

    findings = verify(parsed, facts=facts_of)
    if findings:
        print(render_text(findings, parsed.text, name_of_file(path)), file=sys.stderr)
    return has_errors(findings)
