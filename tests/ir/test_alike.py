"""Replicas that do the same are looked at once, and nothing is missed."""

from __future__ import annotations

import random

import msgspec
from plan_build import make_plan
from plan_generator import generate
from plan_mutator import mutate
from report_plans import written

from resihp.ir.explanation import example_of
from resihp.ir.lanes import alike
from resihp.ir.model import Plan, Stream
from resihp.ir.parser import parse
from resihp.ir.source import Parsed
from resihp.ir.verify import verify


def apart(parsed: Parsed) -> Parsed:
    """The same with a body of its own for each replica, so that none counts as like another."""
    streams = [
        (Stream(replicas=(replica,), pp=stream.pp, body=tuple(i for i in stream.body)), source)
        for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True)
        for replica in stream.replicas
    ]
    return msgspec.structs.replace(
        parsed,
        plan=msgspec.structs.replace(parsed.plan, streams=tuple(stream for stream, _ in streams)),
        streams=tuple(source for _, source in streams),
    )


def shared_plan(rng: random.Random) -> Plan:
    plan = generate(rng)
    if rng.random() < 0.6:
        plan = make_plan(
            pp=rng.choice((1, 2, 3)),
            dp=rng.choice((2, 3, 4)),
            microbatches=2,
            share=True,
            gone=rng.choice((None, {1: 0})),
        )
    return mutate(plan, rng)[0] if rng.random() < 0.8 else plan


def test_looking_at_one_of_many_replicas_finds_what_looking_at_all_does():
    """The same codes at the same places; deadlocks may be told through other replicas."""
    num_shared = 0
    for seed in range(200):
        plan = shared_plan(random.Random(seed))
        parsed = written(plan)
        if parsed is None:
            continue
        all_apart = apart(parsed)
        num_shared += len(alike(parsed.plan)) < len(alike(all_apart.plan))
        here, there = (
            {
                (f.code, None if f.code == "RHP501" else f.span)
                for f in verify(one, quick_proof=False)
            }
            for one in (parsed, all_apart)
        )
        assert here == there, seed
    assert num_shared > 50


def test_a_replica_is_alone_if_it_has_to_do_with_another():
    """By a home, by a peer, or by being named; the others stay together."""
    plan = make_plan(pp=2, dp=5, microbatches=1, share=True)
    assert alike(plan) == {0: (0, 1, 2, 3, 4)}
    assert alike(parse(example_of("RHP414").good).plan) == {0: (0,), 1: (1,)}
    body = plan.streams[0].body
    named = tuple(msgspec.structs.replace(i, peer=3) if i.op.is_transfer else i for i in body)
    streams = (
        msgspec.structs.replace(plan.streams[0], replicas=(0, 2, 3, 4)),
        Stream(replicas=(1,), pp=0, body=named),
        plan.streams[1],
    )
    assert alike(msgspec.structs.replace(plan, streams=streams)) == {
        0: (0, 2, 4),
        1: (1,),
        3: (3,),
    }
