"""Plans grow back once devices have proved themselves, and do not flap with them."""

from __future__ import annotations

import random
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.compiler.adaptation.hysteresis import (
    DEFAULT_PATIENCE,
    Patience,
    Trust,
    Verdict,
    may_grow,
    wait_of,
)
from resihp.errors import UserError

QUICK = Patience(good_iterations=4, most_iterations=64, horizon_iterations=100, switch_s=10.0)


def grow(trust: Trust, iteration: int, patience: Patience = QUICK, **seconds: float) -> Verdict:
    """Whether to count on rank 0 again, by default for a gain that is worth it."""
    times = {"now_s": 2.0, "grown_s": 1.0, "transfer_s": 1.0, **seconds}
    return may_grow(patience, trust, iteration, ranks=[0], **times)


def after(bad: str, patience: Patience = QUICK) -> Trust:
    """Trust after iterations in which rank 0 was good (`.`) or bad (`x`)."""
    trust = Trust()
    for iteration, mark in enumerate(bad):
        trust = trust.seen(iteration, {0} if mark == "x" else set(), patience)
    return trust


def test_a_device_that_was_never_bad_is_trusted_at_once():
    """Standby ranks that a dropped replica left over need no proof."""
    assert grow(Trust(), 0).grow


def test_a_device_must_be_good_for_a_while():
    """Four iterations here; the verdict says how many are left."""
    assert grow(after("x.."), 2) == Verdict(
        grow=False, reason="rank 0 must be good for 2 more iterations"
    )
    assert grow(after("x...."), 4).grow


def test_the_wait_doubles_after_each_relapse_up_to_a_bound():
    """4, 8, 16, ... 64 and no more."""
    assert [wait_of(relapses, QUICK) for relapses in (0, 1, 2, 4, 5, 1000)] == [
        4,
        8,
        16,
        64,
        64,
        64,
    ]
    assert not grow(after("x...." + "x" + "." * 7), 12).grow
    assert grow(after("x...." + "x" + "." * 8), 13).grow


def test_a_device_that_stays_bad_relapses_once():
    """Only becoming bad again counts, not being bad for long."""
    assert after("x..xxxxx").records[0].relapses == 1


def test_a_device_that_was_good_for_long_is_forgiven():
    """Its next failure is the first again."""
    trust = after("x.x.x" + "." * 128)
    assert trust.records == {}
    assert trust.seen(200, {0}, QUICK).records[0].relapses == 0


@pytest.mark.parametrize(("transfer_s", "expected"), [(89.0, True), (90.0, False)])
def test_the_gain_over_the_horizon_must_exceed_the_cost_of_the_switch(transfer_s, expected):
    """100 iterations save 1 s each; a switch costs 10 s and the transfer."""
    verdict = grow(Trust(), 0, transfer_s=transfer_s)
    assert verdict.grow is expected
    assert verdict.reason.startswith("saves 100 s in 100 iterations, costs")


def test_a_plan_that_is_no_faster_is_not_worth_a_switch():
    """Not even a free one."""
    free = Patience(switch_s=0.0)
    assert not grow(Trust(), 0, free, now_s=1.0, grown_s=1.0, transfer_s=0.0).grow


def num_growths(num_iterations: int, patience: Patience, is_bad) -> int:
    """How often a plan that loses rank 0 when it is bad takes it back.

    `is_bad(iteration, used)` is the device; it may know whether the plan uses it.
    """
    trust, used, growths = Trust(), True, 0
    for iteration in range(num_iterations):
        bad = is_bad(iteration, used)
        trust = trust.seen(iteration, {0} if bad else set(), patience)
        if bad:
            used = False
        elif not used and grow(trust, iteration, patience).grow:
            used, growths = True, growths + 1
    return growths


def most_growths(num_iterations: int, patience: Patience) -> float:
    """Each costs twice the iterations of the one before; forgiveness starts over."""
    first, most = patience.good_iterations, patience.most_iterations
    in_a_row = log2(most / first) + 2
    return min(log2(num_iterations / first + 1) + 1, in_a_row) + in_a_row * num_iterations / most


def test_a_device_that_fails_whenever_it_is_used_is_taken_back_ever_less_often():
    """10,000 iterations, 8 of patience at first, 1,024 at most: 15 times, not 1,111."""
    growths = num_growths(10_000, DEFAULT_PATIENCE, lambda _, used: used)
    assert growths == 15
    impatient = Patience(good_iterations=8, most_iterations=8)
    assert num_growths(10_000, impatient, lambda _, used: used) > 1_000


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.1, 0.02, 0.003]), st.integers(1, 16))
def test_the_number_of_switches_is_bounded_for_any_device(seed, rate, good_iterations):
    """Devices that fail and recover at random, more readily while they are used."""
    rng = random.Random(seed)
    patience = Patience(good_iterations=good_iterations, most_iterations=256)

    def is_bad(_: int, used: bool) -> bool:
        return rng.random() < (rate if used else rate / 4)

    growths = num_growths(3_000, patience, is_bad)
    assert growths <= most_growths(3_000, patience)


def test_patience_without_sense_is_refused():
    """The message names the field."""
    with pytest.raises(UserError, match=r"good_iterations 9: must be 1\.\.most_iterations \(8\)"):
        Patience(good_iterations=9, most_iterations=8)
    with pytest.raises(UserError, match="horizon_iterations 0"):
        Patience(horizon_iterations=0)
    with pytest.raises(UserError, match="switch_s -1"):
        Patience(switch_s=-1)
