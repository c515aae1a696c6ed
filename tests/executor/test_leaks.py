"""Nothing is left behind by iterations and by changes of plan; `make parity` runs many more."""

from __future__ import annotations

import pytest
from leaks import leaks


@pytest.mark.timeout(180)
def test_iterations_and_changes_of_plan_leave_nothing():
    """No tensor, thread or descriptor more after 24 plans than after 6."""
    found = leaks(num_plans=24, num_iterations=3, num_warm=6)
    assert found.are_none, found
