"""Plans with a mistake (which now and then is none): one change of what is written, or a few."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from layout_mutations import ABOVE
from mutation_site import Site
from stream_mutations import MUTATIONS

from resihp.ir.model import Instr, Plan

__all__ = ["ABOVE", "MUTATIONS", "ORDER", "SUBTLE", "mutate"]

SUBTLE = (
    *("disorder", "drift", "near", "swap_receives", "swap_sends", "swap_reduces", "swap_work"),
    *("defer_receives", "drop_message", "migrate", "peer", "home", "pair", "fuse", "uncut"),
)
"""Mutations that seldom break what a single stream shows."""
ORDER = (*("disorder",) * 5, "swap_receives", "swap_sends", "swap_reduces")
"""Mutations of which only a run, or a look at all streams together, tells what they break."""


def mutate(
    plan: Plan, rng: random.Random, among: Sequence[str] = ()
) -> tuple[Plan, tuple[str, ...]]:
    """A changed plan, and the names of the mutations: some of `among`, or of all `MUTATIONS`.

    Where they find nothing to change there are none.
    """
    site = Site(plan, rng)
    names: list[str] = []
    wanted = rng.choice((1, 1, 1, 1, 2, 3))
    for _ in range(10 * wanted):
        name = rng.choice(among or list(MUTATIONS))
        if len(names) < wanted and (MUTATIONS | ABOVE)[name](site):
            names.append(name)
    streams = tuple(
        msgspec.structs.replace(stream, body=_well_formed(body))
        for stream, body in zip(site.plan.streams, site.bodies, strict=True)
    )
    return msgspec.structs.replace(site.plan, streams=streams), tuple(names)


def _well_formed(body: Sequence[Instr]) -> tuple[Instr, ...]:
    """Without what no text can say: a pair without its second half, or one of a transfer."""
    return tuple(
        msgspec.structs.replace(instr, paired=False)
        if instr.paired
        and not (instr.op.is_compute and at + 1 < len(body) and body[at + 1].op.is_compute)
        else instr
        for at, instr in enumerate(body)
    )
