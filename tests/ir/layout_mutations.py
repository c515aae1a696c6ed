"""Mistakes above the streams: functions that change the plan of a `Site` in place."""

from __future__ import annotations

import msgspec
from mutation_site import Mutation, Site

from resihp.ir.model import LayerRange

ABOVE: dict[str, Mutation] = {}


def _above(function: Mutation) -> Mutation:
    ABOVE[function.__name__.strip("_")] = function
    return function


@_above
def _tokens(site: Site) -> bool:
    tokens = site.rng.choice((1, 2, 3, 6, 12))
    site.replace(batch=msgspec.structs.replace(site.plan.batch, tokens=tokens))
    return True


@_above
def _count(site: Site) -> bool:
    """One micro-batch more or fewer."""
    batch = site.plan.batch
    number = batch.microbatches + site.rng.choice((-1, 1))
    site.replace(batch=msgspec.structs.replace(batch, microbatches=max(number, 1)))
    return number > 0


@_above
def _degree(site: Site) -> bool:
    """Half of the ranks of a group stand by."""
    large = [at for at, group in enumerate(site.plan.groups) if group.tp > 1]
    if not large:
        return False
    groups, at = list(site.plan.groups), site.rng.choice(large)
    ranks = groups[at].ranks
    groups[at] = msgspec.structs.replace(groups[at], ranks=ranks[: len(ranks) // 2])
    standby = sorted((*site.plan.standby, *ranks[len(ranks) // 2 :]))
    site.replace(groups=tuple(groups), standby=tuple(standby))
    return True


@_above
def _lose(site: Site) -> bool:
    """A group is gone, its stream with it or not."""
    groups = list(site.plan.groups)
    group = groups.pop(site.rng.randrange(len(groups)))
    if not groups:
        return False
    lost = tuple(sorted((*site.plan.lost, *group.ranks)))
    site.replace(groups=tuple(groups), lost=lost)
    if site.rng.random() < 0.8:
        streams = [
            msgspec.structs.replace(
                stream, replicas=tuple(r for r in stream.replicas if r != group.replica)
            )
            if stream.pp == group.pp
            else stream
            for stream in site.plan.streams
        ]
        site.bodies[:] = [b for b, s in zip(site.bodies, streams, strict=True) if s.replicas]
        site.replace(streams=tuple(stream for stream in streams if stream.replicas))
    return True


@_above
def _layers(site: Site) -> bool:
    """A stage begins one layer later or earlier, in a group or in all of its position."""
    chosen = site.rng.choice(site.plan.groups)
    at, step = site.rng.randrange(len(chosen.layers)), site.rng.choice((-1, 1))
    first, last = chosen.layers[at]
    if not 0 <= first + step <= last:
        return False
    everywhere = site.rng.random() < 0.5
    groups = tuple(
        msgspec.structs.replace(
            group,
            layers=(
                *group.layers[:at],
                LayerRange(first + step, last),
                *group.layers[at + 1 :],
            ),
        )
        if group.pp == chosen.pp and (everywhere or group is chosen)
        else group
        for group in site.plan.groups
    )
    site.replace(groups=groups)
    return True
