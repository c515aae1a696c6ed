"""`resihp emulate`: run a plan on emulated devices and hold its time against the simulator's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.described import (
    add_cluster,
    add_health,
    add_lengths,
    add_profile,
    lengths_of,
    positive,
    precision_of,
    pricing_of,
)
from resihp.cli.plan_files import name_of_file, parse_text, read_text, report
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.diagnostics import Diagnostic
    from resihp.ir.model import Plan

__all__ = ["add_arguments", "run"]

_DEADLOCK = "RHP501"
_STUCK = {"RHP412", _DEADLOCK}
"""Findings about the order alone; where a deadlock leads to can be seen in virtual time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan, or - for stdin")
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="in virtual time: exact, and over at once (default: in real time)",
    )
    parser.add_argument("--iterations", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="everything takes X times as long (default: 1)",
    )
    add_cluster(parser)
    add_health(parser)
    add_lengths(parser)
    add_profile(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = (
        "All ranks run in this process, with the executor's own interpreter; nothing is computed. "
        "The plan is verified first. With --virtual a deadlock is played until nobody can go on. "
        "Exit status: 0 done, 1 findings or a deadlock, 2 wrong use, unreadable file or a lost "
        "rank in the plan."
    )


def run(args: argparse.Namespace) -> int:
    """Verify the plan, emulate it and print both times."""
    from msgspec import structs

    positive("--iterations", args.iterations)
    if not 0 < args.time_scale < float("inf"):
        raise UserError(f"--time-scale {args.time_scale:g}: must be more than 0")
    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    _check_level(parsed.plan, args.file)
    errors = _errors(text, args.file)
    is_stuck = _DEADLOCK in errors and errors <= _STUCK
    if errors and not (args.virtual and is_stuck):
        if is_stuck:
            print("hint: --virtual shows where such a plan gets stuck", file=sys.stderr)
        return 1
    plan = structs.replace(parsed.plan, precision=precision_of(args, parsed.plan))
    page = _emulated(plan, args, is_sound=not errors)
    sys.stdout.write(page)
    return 1 if errors else 0


def _check_level(plan: Plan, path: str) -> None:
    from resihp.ir.model import Level

    if plan.level is not Level.PLAN:
        raise UserError(f"{name_of_file(path)} is a {plan.level}; `resihp lower` it first")


def _errors(text: str, path: str) -> set[str]:
    """Codes of the errors that the verifier finds; whatever it finds is printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.diagnostics import Severity
    from resihp.ir.parser import parse
    from resihp.ir.render import render_text
    from resihp.ir.verify import verify

    findings: list[Diagnostic] = verify(parse(text, path=path), facts=facts_of)
    if findings:
        print(render_text(findings, text, name_of_file(path)), file=sys.stderr)
    return {each.code for each in findings if each.severity is Severity.ERROR}


def _emulated(plan: Plan, args: argparse.Namespace, *, is_sound: bool) -> str:
    """The page. Raises Deadlock, in terms of the plan, for one that gets stuck."""
    import msgspec

    from resihp.compiler.lane_times import lane_seconds
    from resihp.compiler.simulate import simulate
    from resihp.executor.emulation.report import render, report_of
    from resihp.executor.emulation.run import emulate

    pricing, lengths = pricing_of(plan, args), lengths_of(args, plan)
    simulated_s = None
    if is_sound:
        simulated_s = args.time_scale * simulate(plan, pricing, lengths=lengths).iteration_s
    seconds = {
        name: [args.time_scale * each for each in of_group]
        for name, of_group in lane_seconds(plan, pricing, lengths).items()
    }
    iterations = emulate(
        plan, seconds, num_iterations=args.iterations, in_real_time=not args.virtual
    )
    found = report_of(plan, iterations, simulated_s)
    if args.format == "json":
        return msgspec.json.format(msgspec.json.encode(found)).decode() + "\n"
    return render(found)
