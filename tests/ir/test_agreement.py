"""The verifier and the slow oracles agree about random plans, schedules and mutants.

Under every transport. `make oracle` asks about many more.
"""

from __future__ import annotations

from collections import Counter

import pytest
from trial import case_of, findings_of, why_refused

NUM_SEEDS = 600


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 100))
def test_what_is_found_is_what_cannot_run(first):
    """No finding where the oracle sees the plan run to its end, some where it does not."""
    seen: Counter[bool] = Counter()
    for seed in range(first, first + 100):
        case = case_of(seed)
        found, why = findings_of(case), why_refused(case)
        assert (not found) == (why is None), (seed, case.mutations, case.transport, found, why)
        seen[not found] += 1
    assert min(seen.values()) > 20
