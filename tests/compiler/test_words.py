"""Times and rates as people read them."""

from __future__ import annotations

import pytest

from resihp.compiler.words import spell_rate, spell_seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [(20570.4, "20,570 s"), (1.2344, "1.234 s"), (0.0567, "56.7 ms"), (2e-6, "2 us"), (0, "0 us")],
)
def test_seconds_have_four_digits_and_no_powers_of_ten(value, said):
    assert spell_seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(24812.3, "24,812"), (3.123, "3.12")])
def test_rates_keep_three_digits_or_more(value, said):
    assert spell_rate(value) == said
