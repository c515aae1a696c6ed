"""A plan played for a picture: its times, and what memory it needs where it is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.described import pricing_of
from resihp.errors import NoFeasiblePlan, UserError

if TYPE_CHECKING:
    import argparse

    from resihp.compiler.pricing import Pricing
    from resihp.compiler.simulate import Simulation
    from resihp.ir.drawing.scene import Played
    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed

__all__ = ["played_of"]

_PRICED = ("cluster", "fail", "slow", "link", "health", "lengths", "contention")
"""Options that ask for predicted times."""
_UNITS = "units of time: F, B and W 1, BW 2, transfers 0"


def played_of(args: argparse.Namespace, parsed: Parsed, *, has_model: bool = True) -> Played:
    """The run of a plan as the command line describes it: predicted, or in units of time.

    A plan with errors, and one for which no cluster is known, is played in units of time; without
    a model, or with errors, its memory is not told. The note of the clock says which.

    Raises UserError for a cluster or a state of health that does not go with the plan.
    """
    from resihp.ir.verify import has_errors, verify

    plan = parsed.plan
    if has_errors(verify(parsed)):
        return _in_units(plan, f"{_UNITS}; the plan has errors, see `resihp verify`")
    if not has_model:
        return _in_units(plan, f"{_UNITS}; the file names no model to price")
    plan = _at_precision(args, plan)
    if args.unit:
        return _with_memory(_in_units(plan, _UNITS))
    if not any(getattr(args, name) for name in _PRICED) and not _has_default(plan):
        return _with_memory(_in_units(plan, f"{_UNITS}; no preset holds the job, see --cluster"))
    return _with_memory(_predicted(args, plan, pricing_of(plan, args)))


def _at_precision(args: argparse.Namespace, plan: Plan) -> Plan:
    from msgspec import structs

    from resihp.cli.described import precision_of

    return structs.replace(plan, precision=precision_of(args, plan))


def _has_default(plan: Plan) -> bool:
    """Whether a preset holds the job."""
    from resihp.compiler.defaults import default_cluster

    try:
        default_cluster(plan)
    except (UserError, NoFeasiblePlan):
        return False
    return True


def _in_units(plan: Plan, note: str) -> Played:
    from resihp.ir.drawing.scene import Clock, Played
    from resihp.ir.lanes import alike, lanes_of
    from resihp.ir.playback import play_back

    kinds = alike(plan)
    lanes = lanes_of(plan, kinds.keys())
    timeline = play_back(plan, lanes)
    return Played(
        plan=plan,
        lanes=lanes,
        timeline=timeline,
        clock=Clock("unit", note),
        kinds=kinds,
        capacity_bytes=plan.memory_bytes,
    )


def _predicted(args: argparse.Namespace, plan: Plan, pricing: Pricing) -> Played:
    from resihp.cli.described import lengths_of
    from resihp.compiler.simulate import simulate
    from resihp.ir.drawing.scene import Clock, Played
    from resihp.ir.lanes import lanes_of

    lengths = lengths_of(args, plan)
    simulation = simulate(plan, pricing, lengths=lengths, contention=args.contention)
    kinds = _kinds(simulation)
    shared = ", links shared" if args.contention else ""
    note = f"predicted for {pricing.cluster.cluster.name}, {plan.precision}{shared}"
    return Played(
        plan=plan,
        lanes=lanes_of(plan, kinds.keys()),
        timeline=simulation.timeline(),
        clock=Clock("s", note),
        kinds=kinds,
        speeds=pricing.health.speed,
        capacity_bytes=plan.memory_bytes or pricing.cluster.device.memory_bytes,
    )


def _kinds(simulation: Simulation) -> dict[int, tuple[int, ...]]:
    """Replicas by the one whose times are theirs."""
    stands_for: list[int] = simulation.arrays.stands_for.tolist()
    kinds: dict[int, list[int]] = {}
    for replica, kind in enumerate(stands_for):
        if kind >= 0:
            kinds.setdefault(kind, []).append(replica)
    return {kind: tuple(members) for kind, members in kinds.items()}


def _with_memory(played: Played) -> Played:
    from resihp.compiler.facts import facts_of

    return played._replace(facts=facts_of(played.plan))
