"""Mistakes in streams: functions that change the plan of a `Site` in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
from mutation_site import Mutation, Site

from resihp.ir.model import Instr, Op

SENDS, RECVS = (Op.SEND_ACT, Op.SEND_GRAD), (Op.RECV_ACT, Op.RECV_GRAD)
CUTS = {
    Op.SCATTER_ACT: Op.SEND_ACT,
    Op.SCATTER_GRAD: Op.SEND_GRAD,
    Op.GATHER_ACT: Op.RECV_ACT,
    Op.GATHER_GRAD: Op.RECV_GRAD,
}
FAMILIES = (
    (Op.F, Op.B, Op.W, Op.BW),
    tuple(op for op in Op if op.is_transfer),
    tuple(CUTS),
    (Op.REDUCE_GRADS, Op.GATHER_PARAMS, Op.FREE_PARAMS),
)
"""Operations that are easily taken for each other."""
MUTATIONS: dict[str, Mutation] = {}


def _mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__.strip("_")] = function
    return function


@_mutation
def _drop(site: Site) -> bool:
    body = site.body()
    del body[site.rng.randrange(len(body))]
    return True


@_mutation
def _drop_message(site: Site) -> bool:
    """Both ends of a transfer and what cuts and joins it."""
    found = site.pick(lambda instr: instr.op in SENDS)
    if found is None:
        return False
    send = found[0][found[1]]
    is_act = send.op is Op.SEND_ACT
    here = (send.op, Op.SCATTER_ACT if is_act else Op.SCATTER_GRAD)
    there = (Op.RECV_ACT, Op.GATHER_ACT) if is_act else (Op.RECV_GRAD, Op.GATHER_GRAD)
    for body in site.bodies:
        body[:] = [
            i
            for i in body
            if not (_matches(i, send, here, 0) or _matches(i, send, there, 1 if is_act else -1))
        ]
    return True


def _matches(instr: Instr, send: Instr, ops: Sequence[Op], step: int) -> bool:
    """Whether the instruction handles the tensor of `send`, as far as what is written tells."""
    if instr.op not in ops or instr.microbatch != send.microbatch:
        return False
    if None not in (instr.home, send.home) and instr.home != send.home:
        return False
    return instr.stage is None or send.stage is None or instr.stage == send.stage + step


@_mutation
def _double(site: Site) -> bool:
    body = site.body()
    body.insert(site.rng.randrange(len(body)), site.rng.choice(body))
    return True


@_mutation
def _near(site: Site) -> bool:
    body = site.body()
    at = site.rng.randrange(len(body))
    after = min(at + 1, len(body) - 1)
    body[at], body[after] = body[after], body[at]
    return at != after


@_mutation
def _far(site: Site) -> bool:
    body = site.body()
    at, other = site.rng.randrange(len(body)), site.rng.randrange(len(body))
    body[at], body[other] = body[other], body[at]
    return at != other


@_mutation
def _move(site: Site) -> bool:
    """To another place of the stream."""
    body = site.body()
    instr = body.pop(site.rng.randrange(len(body)))
    body.insert(site.rng.randint(0, len(body)), instr)
    return True


@_mutation
def _drift(site: Site) -> bool:
    """A few places up or down."""
    found = site.pick(lambda instr: not instr.op.is_compute)
    if found is None:
        return False
    body, at = found
    body.insert(max(0, at + site.rng.choice((-3, -2, -1, 1, 2, 3))), body.pop(at))
    return True


@_mutation
def _disorder(site: Site) -> bool:
    """Another order of all streams, or of one, that each stream alone would bear."""
    strength = site.rng.choice((1.0, 3.0, 10.0, 100.0))
    bodies = site.bodies if site.rng.random() < 0.5 else [site.body()]
    for body in bodies:
        body[:] = _disordered(body, strength, site.rng)
    return True


def _disordered(body: Sequence[Instr], strength: float, rng: random.Random) -> list[Instr]:
    """What belongs to a micro-batch stays in order, and everything with what has none."""
    keys: list[float] = []
    for at, instr in enumerate(body):
        bound = [
            keys[before]
            for before, other in enumerate(body[:at])
            if not (instr.op.has_micro_batch and other.op.has_micro_batch)
            or (
                instr.microbatch == other.microbatch
                and (instr.home == other.home or None in (instr.home, other.home))
            )
        ]
        keys.append(max([at + rng.uniform(0, strength), *bound]))
        if at and body[at - 1].paired:
            keys[at - 1 :] = [max(keys[at - 1 :])] * 2
    return [body[at] for at in sorted(range(len(body)), key=keys.__getitem__)]


@_mutation
def _elsewhere(site: Site) -> bool:
    """To another stream."""
    here, there = site.body(), site.body()
    instr = here.pop(site.rng.randrange(len(here)))
    there.insert(site.rng.randint(0, len(there)), instr)
    return True


@_mutation
def _exchange(site: Site) -> bool:
    """Two instructions of two streams."""
    here, there = site.body(), site.body()
    at, other = site.rng.randrange(len(here)), site.rng.randrange(len(there))
    here[at], there[other] = there[other], here[at]
    return True


def _swap_within(site: Site, ops: Sequence[Op]) -> bool:
    found = site.pick(lambda instr: instr.op in ops)
    if found is None:
        return False
    body, at = found
    others = [i for i, instr in enumerate(body) if instr.op in ops and instr != body[at]]
    if not others:
        return False
    other = min(others, key=lambda i: abs(i - at) + site.rng.random())
    if site.rng.random() < 0.3:
        other = site.rng.choice(others)
    body[at], body[other] = body[other], body[at]
    return True


@_mutation
def _swap_receives(site: Site) -> bool:
    return _swap_within(site, RECVS)


@_mutation
def _swap_sends(site: Site) -> bool:
    return _swap_within(site, SENDS)


@_mutation
def _swap_work(site: Site) -> bool:
    return _swap_within(site, FAMILIES[0])


@_mutation
def _swap_reduces(site: Site) -> bool:
    return _swap_within(site, (Op.REDUCE_GRADS, Op.STEP))


@_mutation
def _defer_receives(site: Site) -> bool:
    """Every receive of a stream goes right before the next thing of its micro-batch and stage."""
    body = site.body()
    for at in reversed(range(len(body))):
        instr = body[at]
        if instr.op in RECVS:
            later = range(at + 1, len(body))
            uses = (i for i in later if _same_work(body[i], instr) and not body[i - 1].paired)
            if use := next(uses, None):
                body.insert(use - 1, body.pop(at))
    return True


@_mutation
def _micro_batch(site: Site) -> bool:
    number = site.rng.randrange(site.plan.batch.microbatches + 1)
    return _retarget(site, lambda instr: instr.op.has_micro_batch, microbatch=number)


@_mutation
def _home(site: Site) -> bool:
    home = site.rng.choice((None, *range(site.plan.mesh.dp + 1)))
    return _retarget(site, lambda instr: instr.op.has_micro_batch, home=home)


@_mutation
def _stage(site: Site) -> bool:
    num_stages = len({layers.first for group in site.plan.groups for layers in group.layers})
    stage = site.rng.choice((None, *range(num_stages + 1)))
    return _retarget(site, lambda instr: instr.op.has_stage, stage=stage)


@_mutation
def _peer(site: Site) -> bool:
    peer = site.rng.choice((None, *range(site.plan.mesh.dp + 1)))
    return _retarget(site, lambda instr: instr.op.is_transfer, peer=peer)


def _retarget(site: Site, is_wanted: Callable[[Instr], bool], **changes: int | None) -> bool:
    found = site.pick(is_wanted)
    if found is None:
        return False
    body, at = found
    old, body[at] = body[at], msgspec.structs.replace(body[at], **changes)
    return body[at] != old


@_mutation
def _op(site: Site) -> bool:
    """Another operation of the same kind."""
    body = site.body()
    at = site.rng.randrange(len(body))
    family = next((ops for ops in FAMILIES if body[at].op in ops), None)
    if family is None:
        return False
    old, body[at] = body[at], msgspec.structs.replace(body[at], op=site.rng.choice(family))
    return body[at] != old


@_mutation
def _uncut(site: Site) -> bool:
    """Without the scatter or the gather of a transfer; now and then without both."""
    found = site.pick(lambda instr: instr.op in CUTS)
    if found is None:
        return False
    body, at = found
    cut = body.pop(at)
    if site.rng.random() < 0.5:
        for other in site.bodies:
            other[:] = [
                instr
                for instr in other
                if instr.op not in CUTS
                or instr.op.mnemonic.split("_")[1] != cut.op.mnemonic.split("_")[1]
                or instr.microbatch != cut.microbatch
                or instr.home not in (cut.home, None)
            ]
    return True


@_mutation
def _cut(site: Site) -> bool:
    """With a scatter or a gather more."""
    found = site.pick(lambda instr: instr.op.is_transfer)
    if found is None:
        return False
    body, at = found
    op = next(cut for cut, op in CUTS.items() if op is body[at].op)
    instr = msgspec.structs.replace(body[at], op=op, peer=None)
    body.insert(at if body[at].op in SENDS else at + 1, instr)
    return True


@_mutation
def _pair(site: Site) -> bool:
    """Two that follow each other become a pair, or a pair two."""
    found = [
        (body, at)
        for body in site.bodies
        for at in range(len(body) - 1)
        if body[at].op.is_compute and body[at + 1].op.is_compute
    ]
    if not found:
        return False
    body, at = site.rng.choice(found)
    body[at] = msgspec.structs.replace(body[at], paired=not body[at].paired)
    return True


@_mutation
def _fuse(site: Site) -> bool:
    """B, and W where it stands, become BW; or the other way round."""
    found = site.pick(lambda instr: instr.op in (Op.B, Op.BW))
    if found is None:
        return False
    body, at = found
    instr = body[at]
    if instr.op is Op.BW:
        body[at] = msgspec.structs.replace(instr, op=Op.B)
        weights = msgspec.structs.replace(instr, op=Op.W, paired=False)
        body.insert(site.rng.randint(at + 1, len(body)), weights)
        return True
    body[at] = msgspec.structs.replace(instr, op=Op.BW)
    weights = next((i for i in body if i.op is Op.W and _same_work(i, instr)), None)
    if weights is not None:
        body.remove(weights)
    return True


def _same_work(one: Instr, other: Instr) -> bool:
    return (one.microbatch, one.home, one.stage) == (other.microbatch, other.home, other.stage)


@_mutation
def _migrate(site: Site) -> bool:
    """All of one micro-batch and stage to another stream, transfers as they were."""
    found = site.pick(lambda instr: instr.op is Op.F)
    if found is None:
        return False
    body, at = found
    there = site.body()
    if there is body:
        return False
    chosen = body[at]
    for instr in [i for i in body if i.op.has_micro_batch and _same_work(i, chosen)]:
        place = body.index(instr) * len(there) // len(body)
        body.remove(instr)
        there.insert(place, instr)
    return True


@_mutation
def _unshare(site: Site) -> bool:
    """One replica of a shared stream gets its own, which others may change."""
    shared = [at for at, stream in enumerate(site.plan.streams) if len(stream.replicas) > 1]
    if not shared:
        return False
    at = site.rng.choice(shared)
    streams = list(site.plan.streams)
    chosen = site.rng.choice(streams[at].replicas)
    rest = tuple(replica for replica in streams[at].replicas if replica != chosen)
    streams.append(msgspec.structs.replace(streams[at], replicas=(chosen,)))
    streams[at] = msgspec.structs.replace(streams[at], replicas=rest)
    site.replace(streams=tuple(streams))
    site.bodies.append(list(site.bodies[at]))
    _near_in(site.bodies[site.rng.choice((at, -1))], site.rng)
    return True


def _near_in(body: list[Instr], rng: random.Random) -> None:
    at = rng.randrange(len(body))
    after = min(at + 1, len(body) - 1)
    body[at], body[after] = body[after], body[at]
