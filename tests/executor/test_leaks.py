"""Nothing is left behind by iterations and by changes of plan; `make parity` runs many more."""

from __future__ import annotations

import pytest
from fleet_host import Resources
from leaks import RESIDENT_BYTES, Leaks, leaks

HELD = Resources(
    num_tensors=9, tensor_bytes=900, num_threads=5, num_descriptors=7, resident_bytes=1 << 28
)


@pytest.mark.timeout(180)
def test_iterations_and_changes_of_plan_leave_nothing():
    """[T29] Not one tensor, byte, thread or descriptor more after 15 plans than after 6."""
    found = leaks(num_plans=15, num_iterations=2, num_warm=6)
    assert found.are_none, found


@pytest.mark.parametrize(
    "more",
    [
        {"num_tensors": 10, "num_threads": 4},
        {"num_tensors": 8, "tensor_bytes": 901},
        {"num_tensors": 8, "num_threads": 6},
        {"num_tensors": 8, "num_descriptors": 8},
        {"resident_bytes": HELD.resident_bytes + RESIDENT_BYTES + 1},
    ],
)
def test_one_thing_more_is_a_leak_whatever_else_is_less(more):
    """Counts do not stand in for one another."""
    assert not Leaks(HELD, HELD._replace(**more)).are_none
    assert Leaks(HELD, HELD._replace(num_tensors=8)).are_none
