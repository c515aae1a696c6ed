"""Frequencies of every scaling against the definitions, channel by channel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.config import RopeScaling
from resihp.executor.rope import rope_of, rope_table

HALVES = st.sampled_from([2, 4, 16, 32])
THETAS = st.sampled_from([100.0, 10000.0, 1e6])
FACTORS = st.sampled_from([1.0, 2.0, 8.0, 40.0])
CONTEXTS = st.sampled_from([64, 4096, 32768])


def plain(half: int, theta: float) -> list[float]:
    return [theta ** (-i / half) for i in range(half)]


def assert_frequencies(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=2e-6, atol=0.0)


@given(HALVES, THETAS)
def test_frequencies_fall_from_one_to_the_base(half, theta):
    """Channel i of a head of 2 e channels turns theta^(-i/e) radians per position."""
    rope = rope_of(2 * half, theta)
    assert_frequencies(rope.frequencies_e, plain(half, theta))
    assert rope.attention_factor == 1.0


@given(HALVES, THETAS, FACTORS)
def test_linear_divides_all_alike(half, theta, factor):
    """As if positions were divided."""
    rope = rope_of(2 * half, theta, RopeScaling(rope_type="linear", factor=factor))
    assert_frequencies(rope.frequencies_e, [f / factor for f in plain(half, theta)])


@given(HALVES, THETAS, FACTORS, CONTEXTS)
def test_llama3_divides_what_turns_seldom(half, theta, factor, context):
    """Less than once over the context: divided. More than four times: kept. Between: blended."""
    scaling = RopeScaling(
        rope_type="llama3", factor=factor, original_max_position_embeddings=context
    )
    expected = []
    for frequency in plain(half, theta):
        turns = context / (2 * math.pi / frequency)
        if turns < 1.0:
            expected.append(frequency / factor)
        elif turns > 4.0:
            expected.append(frequency)
        else:
            share = (turns - 1.0) / 3.0
            expected.append((1.0 - share) * frequency / factor + share * frequency)
    assert_frequencies(rope_of(2 * half, theta, scaling).frequencies_e, expected)


@given(HALVES, THETAS, FACTORS, CONTEXTS)
def test_yarn_divides_from_the_channel_that_turns_once(half, theta, factor, context):
    """Kept up to the channel of 32 turns, divided from that of one turn, a ramp between."""
    scaling = RopeScaling(rope_type="yarn", factor=factor, original_max_position_embeddings=context)

    def channel(turns: float) -> float:
        """Where theta^(-i/e) makes `turns` over the context; i need not be whole."""
        return half * math.log(context / (2 * math.pi * turns)) / math.log(theta)

    first, last = max(math.floor(channel(32.0)), 0), math.ceil(channel(1.0))
    last = min(last, 2 * half - 1)
    expected = []
    for i, frequency in enumerate(plain(half, theta)):
        share = min(max((i - first) / max(last - first, 0.001), 0.0), 1.0)
        expected.append(share * frequency / factor + (1.0 - share) * frequency)
    rope = rope_of(2 * half, theta, scaling)
    assert_frequencies(rope.frequencies_e, expected)
    assert rope.attention_factor == pytest.approx(1.0 + 0.1 * math.log(factor))


def test_the_factor_on_the_scores_is_part_of_the_table():
    """yarn's factor multiplies cosine and sine, so that scores get its square."""
    scaling = RopeScaling(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.5
    )
    rope = rope_of(8, 100.0, scaling)
    cos_T1e, sin_T1e = rope_table(torch.arange(5), rope)
    torch.testing.assert_close(cos_T1e.square() + sin_T1e.square(), torch.full((5, 1, 4), 0.25))
